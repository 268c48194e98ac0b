"""Phases within one parallel loop: each is a number of pieces of work, all of which are done before the next phase begins.

    for worker in prange(workers):
        for phase in range(phases):
            piece = claim(turns, phase)
            while piece < pieces: ...; finish(turns, phase); piece = claim(turns, phase)
            wait(turns, phase, pieces)
A parallel loop for each phase would start and stop all threads each time. A thread here takes the next piece as soon as it is
free, so one that starts late delays nobody, and a loop that runs on fewer threads than workers still ends.
Tested by: tests/kernels/cpu/test_kernel_phases.py."""

import os
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tapeless.kernels.cpu.jit import BITS, inlined

INDEX = ir.IntType(64)
CLAIMED, FINISHED, PADDED = 0, 1, 8  # pieces of a phase, and the length of its row: a line of the cache
SPINS = 2**16  # about 50 us; then the core is offered to another thread, which may be the one that is waited for


@inlined
def new_turns(phases):
    return np.zeros(phases * PADDED, np.int64)


def _place(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
    return builder.gep(context.make_array(signature.args[0])(context, builder, args[0]).data, [args[1]])


@intrinsic
def _add_one(typingctx: Any, counters: Any, i: Any) -> Any:
    """The counter before."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _place(context, builder, signature, args), INDEX(1), "acq_rel")

    return types.intp(counters, types.intp), codegen


@intrinsic
def _value(typingctx: Any, counters: Any, i: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_place(context, builder, signature, args), "acquire", 8)

    return types.intp(counters, types.intp), codegen


@intrinsic
def _yield(typingctx: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        name = "sched_yield"
        if os.name == "posix":  # elsewhere the waiting thread spins on
            function = builder.module.globals.get(name) or ir.Function(builder.module, ir.FunctionType(BITS, []), name)
            builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), codegen


@inlined
def claim(turns, phase):
    return _add_one(turns, phase * PADDED + CLAIMED)


@inlined
def finish(turns, phase):
    _add_one(turns, phase * PADDED + FINISHED)


@inlined
def wait(turns, phase, pieces):
    spins = 0
    while _value(turns, phase * PADDED + FINISHED) < pieces:
        spins += 1
        if spins > SPINS:
            _yield()
