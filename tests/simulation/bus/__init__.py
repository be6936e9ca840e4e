"""A broker in memory that loses, delays and repeats what a Kafka broker may, and keeps what it must."""
