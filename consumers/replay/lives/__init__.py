"""The life of a single trajectory, from its order to the weights that it taught, as the topics tell it."""
