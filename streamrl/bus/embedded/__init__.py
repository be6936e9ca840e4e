"""A real Apache Kafka (KRaft) broker or cluster on this machine; needs neither Docker nor an installed Java."""
