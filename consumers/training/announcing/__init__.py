"""How the trainer tells the run what it did: in order, once per version, and only while nobody has taken over."""
