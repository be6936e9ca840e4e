"""The shelf's losses and curves, and what many consumers of one stream cost and save: attached instances, graders."""
