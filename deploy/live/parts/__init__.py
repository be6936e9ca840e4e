"""The bounded pieces that a live state is made of. Pure; time is passed in."""
