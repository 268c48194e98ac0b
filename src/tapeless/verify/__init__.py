"""Gradient checks: oracles that share no code with the backward passes, and the levels at which they are applied."""
