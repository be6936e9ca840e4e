"""How fast the whole pipeline is by mode, dispatch and ranker: measured with real processes, and computed."""
