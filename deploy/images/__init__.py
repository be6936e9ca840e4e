"""Container images, and what runs inside them besides the processes of a run."""
