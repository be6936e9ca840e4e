"""The message bus: the port that every role uses, its in-memory adapter, and its adapter for Apache Kafka."""
