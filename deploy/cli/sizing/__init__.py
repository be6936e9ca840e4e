"""What this hardware can do, and what a run would need."""
