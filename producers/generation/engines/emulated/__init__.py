"""Generation without a model: a decode-time curve and a length trace stand in for it, at a stated time scale."""
