"""Turns step reports, heartbeats and operator commands into control messages."""
