"""Training: the loop, and the run directory with the checkpoints that a run resumes from."""
