"""Each contender trains the same policy on the same prompts, in processes of its own, and leaves weights behind."""
