"""Learned predictors of output length: gradient-boosted trees or a language model, refitted during the run."""
