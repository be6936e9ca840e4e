"""The front door: the Python API and the `streamrl` command."""
