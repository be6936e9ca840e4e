"""One typed tree of settings, read from TOML, then the environment, then the command line; and a run's directory."""
