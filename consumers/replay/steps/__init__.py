"""What the topics say about past steps: which of them survive, and the samples that each one took."""
