"""Whether the emulated engine's curve model says what a real engine does: one batch on both, from one profile."""
