"""Generation: the worker, its engines and its tokenizer."""
