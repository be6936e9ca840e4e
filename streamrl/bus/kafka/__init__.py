"""The bus on Apache Kafka: the only package that imports aiokafka."""
