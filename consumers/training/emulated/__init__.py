"""Training without a model: waits as long as a profile says, and writes real, tiny weights and checkpoints."""
