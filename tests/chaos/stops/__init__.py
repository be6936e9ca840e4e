"""Roles and edges, stopped and cancelled at random moments under load: in one process, and as processes of a run."""
