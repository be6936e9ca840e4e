"""What can be wrong with the books, and how it is told."""
