"""Training on several ranks: what they exchange (world.py), the sum of their gradients (gradient_sum.py), how they are started
(launch.py)."""
