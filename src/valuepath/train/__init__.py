"""One run: its settings, its optimiser, the training itself on transformers' ``Trainer``, its folder."""
