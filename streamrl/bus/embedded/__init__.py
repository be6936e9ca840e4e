"""A real Apache Kafka (KRaft) broker or cluster on this machine, without Docker or an installed Java."""
