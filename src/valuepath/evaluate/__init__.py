"""What a model makes of held-out text."""
