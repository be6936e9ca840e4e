"""Evaluation during training: held-out prompts, sampled by the run's own workers and never trained."""
