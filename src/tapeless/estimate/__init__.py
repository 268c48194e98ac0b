"""What a run will need, before it runs: parameters, memory by part, arithmetic, time, disk."""
