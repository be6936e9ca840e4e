"""What can be found out about a run before it starts, one subject a file; nothing is started that stays."""
