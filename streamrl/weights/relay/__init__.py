"""The relay tier: one relay a host, from the trainer's store down a chain of hosts to the workers of each."""
