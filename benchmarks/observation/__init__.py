"""What it costs a run to be looked at: the demo with metrics on and off, and with viewers who come and go."""
