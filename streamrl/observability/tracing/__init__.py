"""Traces: what became of a prompt, from its order to the weights that came of it, as OpenTelemetry spans."""
