"""What one optimizer step is answerable for: the groups it gathered, its metrics, its report."""
