"""What one life of the trainer hands to the next, and the named points at which a life may end."""
