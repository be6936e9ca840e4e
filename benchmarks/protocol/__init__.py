"""What exactly-once training costs the trainer: the same trajectories trained with the protocol on and off."""
