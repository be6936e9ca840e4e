"""Diagnoses a running loop through its broker: status, lag, tail, trace, and the doctor."""
