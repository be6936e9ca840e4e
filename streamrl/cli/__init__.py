"""The `streamrl` command. Nothing heavy is imported before a command needs it."""
