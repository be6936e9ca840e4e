"""Where prompts come from: procedural data sets, or stored rows."""
