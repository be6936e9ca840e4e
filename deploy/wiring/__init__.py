"""The only place where ports meet adapters: one build function per process."""
