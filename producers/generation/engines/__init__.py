"""The worker's engines: a thread that runs a decoder, the decoders (transformers, vLLM), and the emulated engine."""
