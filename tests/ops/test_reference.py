"""The reference set: its ops are those that the cases judge, and no field is without a case."""

from collections.abc import Mapping
from dataclasses import fields

from tapeless.ops.op import Op, OpSet
from tapeless.ops.reference import REFERENCE
from tapeless.verify.cases import CASES, cases_of


def test_every_op_of_the_set_is_judged():
    slots = {case.slot for case in CASES}
    for field in fields(OpSet):
        ops = getattr(REFERENCE, field.name)
        if isinstance(ops, (Op, Mapping)):
            kinds = [(field.name, kind) for kind in ops] if isinstance(ops, Mapping) else [(field.name,)]
            assert slots.issuperset(kinds)


def test_cases_of_a_set_hold_its_own_ops():
    by_name = {case.name: case for case in CASES}
    for case in cases_of(REFERENCE):
        if "chunks" not in case.name:  # that one sets the size of a block of the reference op
            assert case.op is by_name[case.name].op
