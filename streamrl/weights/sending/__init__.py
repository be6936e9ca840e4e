"""The weight sender (optional): sends weights from the trainer's store straight into vLLM's processes."""
