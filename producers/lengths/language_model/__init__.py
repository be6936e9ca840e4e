"""The paper's ranker: a small language model fine-tuned to regress the logarithm of length (StreamRL, section 5)."""
