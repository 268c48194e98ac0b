"""From text to batches: sources, tokenizers, token files, and a sample order that is a pure function of the seed."""
