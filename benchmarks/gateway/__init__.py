"""What the gateway costs: a first token, throughput, a thousand readers at once, and ten times too many requests."""
