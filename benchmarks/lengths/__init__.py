"""Length predictors on a mixed reasoning-gym task set: who is long, how sure, and at what cost."""
