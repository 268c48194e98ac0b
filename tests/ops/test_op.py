"""Dropping activations from a record by name, and handing equal ones back."""

from typing import NamedTuple

import torch

from tapeless.ops.op import handed_back, without


class Record(NamedTuple):
    x: torch.Tensor
    r: torch.Tensor


def test_without_drops_only_what_is_there_by_that_name():
    record = Record(torch.ones(2), torch.ones(1))
    dropped = without(record, "x", "nothing")
    assert dropped.x is None
    assert dropped.r is record.r
    assert without(None, "x") is None


def test_handed_back_is_the_inverse():
    record = Record(torch.ones(2), torch.ones(1))
    again = handed_back(without(record, "x"), x=record.x, nothing=record.r)
    assert all(a is b for a, b in zip(again, record, strict=True))
    assert handed_back(None, x=record.x) is None
