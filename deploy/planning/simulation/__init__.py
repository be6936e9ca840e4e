"""The loop as discrete events in emulated time: dispatcher, workers and trainer, without processes or topics."""
