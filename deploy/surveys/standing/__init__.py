"""`streamrl status` and `streamrl lag`: where a run stands, and how far its consumers are behind."""
