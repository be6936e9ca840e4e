"""How good the saved weights of every contender are on held-out prompts, when they were, and what that looks like."""
