"""The quick calculation: what modes and plans reach if nothing but decoding and training takes time. Pure."""
