"""Starts the processes of a run on this machine, restarts what dies, and ends them cleanly."""
