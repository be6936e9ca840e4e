"""A trainer over several devices: rank 0 is the trainer, the others compute what it deals to them."""
