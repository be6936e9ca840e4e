"""The composition root: wires roles, starts and supervises processes, and builds images. It may import everything."""
