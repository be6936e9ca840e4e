"""The present state of a run, folded from its topics. Terminal, dashboard and progress lines show it."""
