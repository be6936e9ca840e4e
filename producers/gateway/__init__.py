"""The OpenAI-compatible door to a run's workers: requests in, tokens out as they come, feedback into training."""
