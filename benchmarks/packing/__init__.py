"""How much of the trainer's micro-batches is padding, and how evenly they would keep data-parallel ranks busy."""
