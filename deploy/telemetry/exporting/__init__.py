"""Where spans go: a file of the run, or an OpenTelemetry collector."""
