"""Serves weight versions over HTTP; knows files and checksums, not what the tensors mean."""
