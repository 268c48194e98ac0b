"""Fast versions of the ops, and the one place where a set is chosen."""
