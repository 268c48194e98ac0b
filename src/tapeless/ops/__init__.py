"""The mathematics: each op's forward beside its backward, in plain torch. See op.py for the contract."""
