"""What each of Kafka's codecs saves on trajectories, and what it costs both sides."""
