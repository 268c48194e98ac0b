"""From text to batches: sources, tokenizers, token files, and an order that is a pure function of the seed."""
