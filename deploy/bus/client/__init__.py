"""Parts around aiokafka that know nothing of our settings: batches in and out, time-outs, and who holds an id."""
