"""What a group of samples teaches: advantages (numpy) and token losses (torch). Knows no bus and no optimizer."""
