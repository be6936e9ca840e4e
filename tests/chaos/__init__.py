"""Faults against real brokers and real processes, generated from seeds; `checking` says what must hold afterwards."""
