"""A trainer over several devices: rank 0 is the trainer, the others compute the rows that it gives them."""
