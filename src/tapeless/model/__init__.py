"""Models made of ops: parameters in one flat buffer, forward, and backward as its mirror image."""
