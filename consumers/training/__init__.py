"""The trainer: gradient accumulation as groups arrive, optimizer steps, checkpoints, weight export, step reports."""
