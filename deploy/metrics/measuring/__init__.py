"""Where the figures come from: what a process writes and reads, what the dispatcher and the relay say of themselves."""
