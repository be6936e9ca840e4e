"""The real parts of the pipeline in one process and in virtual time."""
