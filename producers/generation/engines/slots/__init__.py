"""The transformers decoder: a batch of slots that is refilled at every step."""
