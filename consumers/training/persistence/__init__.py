"""What outlives the trainer's process: checkpoints, lineage numbers, and the weights that workers fetch."""
