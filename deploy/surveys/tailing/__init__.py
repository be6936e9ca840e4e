"""`streamrl tail`: the records of a topic, decoded, filtered, one line each."""
