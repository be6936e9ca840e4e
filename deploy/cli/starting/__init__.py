"""Commands for the first minutes: files to begin with, and the settings explained."""
