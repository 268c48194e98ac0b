"""Text generation: the sampler and the loop around it."""
