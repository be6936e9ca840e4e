"""The Java side of the broker: its jars, the Java runtime and operating-system processes. Knows nothing of topics."""
