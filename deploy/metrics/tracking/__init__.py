"""Step reports into experiment trackers: TensorBoard, Weights & Biases, trackio."""
