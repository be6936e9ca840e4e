"""Stand-ins for what is not under test: engine, rewards, prompts, policy, weights, and the checkpoints' store."""
