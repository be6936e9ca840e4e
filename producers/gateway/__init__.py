"""The OpenAI-compatible gateway to a run's workers: answers requests, streams tokens, trains on feedback."""
