"""The composition root: what a process hands its role, one build function for each role, and the broker they share."""
