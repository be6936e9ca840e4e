"""The message bus: the port that every role is written against, its in-memory twin, and Apache Kafka behind it."""
