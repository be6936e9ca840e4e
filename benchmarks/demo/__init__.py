"""What the demo learns on four seeds and both engines, beside as much processor time of supervised training."""
