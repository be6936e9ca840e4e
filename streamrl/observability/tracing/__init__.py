"""Traces of prompts as OpenTelemetry spans, from a prompt's order to the weights that it helped to train."""
