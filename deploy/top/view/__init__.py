"""What stands on the screen: panels, tabs, keys. Knows the snapshot and how to draw it, and no broker."""
