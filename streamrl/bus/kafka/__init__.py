"""The bus on Apache Kafka: the only room that knows aiokafka."""
