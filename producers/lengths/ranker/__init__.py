"""Makes the models that predictors use: during a run as a process of its own, or offline from recorded trajectories."""
