"""A trainer that kills itself at a named point of its commit, and the proof that nothing came of it."""
