"""Lengths that are known before they happen, as an emulated run knows them."""
