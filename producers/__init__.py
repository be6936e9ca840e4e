"""Everything that makes trajectories: prompts, length estimates, dispatch, generation and rewards."""
