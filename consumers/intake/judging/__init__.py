"""What becomes of one trajectory: known already, too old, without a reward, or a member of a group. All pure."""
