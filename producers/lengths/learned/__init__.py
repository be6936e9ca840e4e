"""A light predictor that learns: gradient-boosted quantiles over features of the prompt, fitted as a run goes on."""
