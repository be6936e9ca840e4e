"""Pure plans: which worker samples which prompts of a window, in which order, and how many at once."""
