"""The weight sender: an optional way of weights, from the trainer's store straight into vLLM's processes."""
