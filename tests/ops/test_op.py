"""Dropping activations from a record by name and restoring equal ones; changing every op of a set."""

from typing import NamedTuple

import torch

from tapeless.ops.op import Op, drop, restore
from tapeless.ops.reference import REFERENCE


class Record(NamedTuple):
    x: torch.Tensor
    r: torch.Tensor


def test_drop_empties_only_the_fields_of_that_name():
    record = Record(torch.ones(2), torch.ones(1))
    dropped = drop(record, "x", "nothing")
    assert dropped.x is None
    assert dropped.r is record.r
    assert drop(None, "x") is None


def test_restore_is_the_inverse():
    record = Record(torch.ones(2), torch.ones(1))
    again = restore(drop(record, "x"), x=record.x, nothing=record.r)
    assert all(a is b for a, b in zip(again, record, strict=True))
    assert restore(None, x=record.x) is None


def test_map_reaches_every_op():
    reached: list[tuple[str, Op]] = []

    def change(field: str, op: Op) -> Op:
        reached.append((field, op))
        return op._replace(both=op.forward)

    changed = REFERENCE.map(change)
    assert changed.linear == REFERENCE.linear._replace(both=REFERENCE.linear.forward)
    assert changed.norm["layer"].both is REFERENCE.norm["layer"].forward
    assert [field for field, _ in reached].count("ffn_down") == len(REFERENCE.ffn_down)
    assert {field for field, _ in reached} >= {"embed", "add_norm", "qkv_rope", "attention", "linear_cross_entropy", "dropout"}
    assert changed.name == REFERENCE.name
