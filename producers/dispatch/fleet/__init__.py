"""Who samples: the workers as their heartbeats show them, what each one owes, and how far it has got."""
