"""What only the end of a run can tell, kept in its directory: what its topics said, samples, the environment."""
