"""A whole run on this machine: its directory, its processes, its evaluation, from the first step to the report."""
