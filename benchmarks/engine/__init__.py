"""What the way from a work order to a trajectory costs the engine: the pipeline on vLLM against vLLM alone."""
