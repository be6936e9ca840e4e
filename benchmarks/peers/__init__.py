"""StreamRL against its peers: the same model, tasks and rewards trained by each, timed to the same held-out reward."""
