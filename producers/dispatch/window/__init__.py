"""The window: the next prompts, drawn in order of position and sent as the plan says, before any later one is."""
