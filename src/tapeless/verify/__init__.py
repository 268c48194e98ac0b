"""The proof: oracles that know nothing of the backward passes, the levels they judge at, and mutants that judge the judges."""
