"""The composition root: the context that a process gives its role, a build function per role, and the shared broker."""
