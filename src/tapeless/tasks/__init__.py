"""A model of ours under EleutherAI's lm-eval: what it asks (scores of texts, texts up to a stop), and the class it asks."""
