"""Orders prompts less often whose groups would have no advantage, by what earlier groups earned."""
