"""Whether `streamrl plan` says what the emulated pipeline then delivers: predictions beside real runs."""
