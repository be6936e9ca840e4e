"""What must hold of everything that a run left behind."""
