"""The engines behind the worker: one thread around a decoder, and the decoders (transformers, vLLM)."""
