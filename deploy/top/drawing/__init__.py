"""Draws sections of a live snapshot with characters. Pure: data, width and height in; text out. Knows no terminal."""
