"""The measurements themselves, each on the real part: decoder, policy, relay and fetcher. Fit nothing."""
