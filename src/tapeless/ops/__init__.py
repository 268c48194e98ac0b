"""The mathematics: each op's forward next to its backward, in plain torch. See op.py for the contract."""
