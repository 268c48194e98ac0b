"""Evaluation with EleutherAI's lm-eval: log-likelihoods, generation up to a stop string, and the model class it calls."""
