"""Training: the loop, and the run directory with its checkpoints that a killed run goes on from."""
