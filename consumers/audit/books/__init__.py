"""What the topics of a run say, in compact tables, and which lineages of it survive."""
