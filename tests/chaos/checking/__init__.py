"""What must hold after every run, read from the topics and checkpoints alone."""
