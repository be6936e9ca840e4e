"""What outlives the trainer's process: checkpoints, lineage numbers, and where they are kept."""
