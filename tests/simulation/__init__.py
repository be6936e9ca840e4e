"""The whole loop in one process: production classes on a simulated bus, a virtual clock, and faults from a seed."""
