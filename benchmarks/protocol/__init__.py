"""What exactly-once training costs the trainer: one trainer, its protocol switched on and off every few steps."""
