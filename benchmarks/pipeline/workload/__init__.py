"""What the pipeline is given to do, and how long that takes at best."""
