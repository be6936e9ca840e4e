"""``make bench-step``: the processor time of a step by process and phase, beside the time of its matmuls alone."""
