"""What it costs a run to be looked at: the demo with metrics and viewers on and off, in turns."""
