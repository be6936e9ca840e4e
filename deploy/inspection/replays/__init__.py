"""Replays and lives of trajectories on the command line: where a run is read from, and how results are shown."""
