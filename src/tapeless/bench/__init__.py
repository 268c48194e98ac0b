"""Side by side with what one would use instead: the same model and step in PyTorch and in transformers, in one run."""
