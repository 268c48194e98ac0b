"""Every op in every variant that matters, with inputs that expose bugs and an independent formula to compare with.

A case is named `op file[variant]`. Its op can be replaced (`dataclasses.replace(case, op=…)`, or `cases_of` for a whole set):
the same cases and bounds check every kernel, at any sizes it has branches for (`case.at`)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tapeless.config import nearest
from tapeless.errors import ConfigError
from tapeless.ops.add_norm import ADD_LAYER_NORM, ADD_RMS_NORM
from tapeless.ops.attention import ATTENTION
from tapeless.ops.broadcast import ADD, MUL
from tapeless.ops.cross_entropy import CROSS_ENTROPY
from tapeless.ops.dropout import DROPOUT, dropout_key
from tapeless.ops.embed import EMBED
from tapeless.ops.ffn_down import FFN_DOWN
from tapeless.ops.ffn_gate import GEGLU, SWIGLU
from tapeless.ops.layer_norm import LAYER_NORM
from tapeless.ops.linear import LINEAR
from tapeless.ops.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from tapeless.ops.lora import LORA
from tapeless.ops.matmul import MATMUL
from tapeless.ops.numerics import accumulation_dtype
from tapeless.ops.op import Op, OpSet
from tapeless.ops.pointwise import GELU, RELU, RELU2, SIGMOID, SILU, TANH
from tapeless.ops.positions import POSITIONS
from tapeless.ops.qkv_rope import QKV_ROPE
from tapeless.ops.reference import REFERENCE
from tapeless.ops.rms_norm import RMS_NORM
from tapeless.ops.rope import ROPE
from tapeless.ops.softcap import SOFTCAP
from tapeless.ops.softmax import LOG_SOFTMAX, SOFTMAX
from tapeless.verify import op_fixtures as fixtures
from tapeless.verify import op_references as formulas
from tapeless.verify.oracles import Function, Point

Gradients = dict[str, Tensor]  # by the name of the input: the gradient of x is at x
SHAPE = fixtures.Shape()
# The reference op in blocks of three rows: a tiny fixture has several, and a last one that is shorter. A kernel has blocks of
# its own; kernel_ops.py has rows enough for them.
IN_CHUNKS = LINEAR_CROSS_ENTROPY._replace(
    forward=partial(LINEAR_CROSS_ENTROPY.forward, chunk=3 * SHAPE.V),
    backward=partial(LINEAR_CROSS_ENTROPY.backward, chunk=3 * SHAPE.V),
)
SLOTS: dict[Op, tuple[str, ...]] = {IN_CHUNKS: ("linear_cross_entropy",)}
for _field, _member in vars(REFERENCE).items():
    if isinstance(_member, Op):
        SLOTS[_member] = (_field,)
    elif isinstance(_member, Mapping):
        SLOTS |= {_op: (_field, _kind) for _kind, _op in _member.items()}


@dataclass(frozen=True)
class OpCase:
    name: str
    op: Op
    build: Callable[[torch.Generator, fixtures.Shape], dict[str, Tensor]]  # of op_fixtures.py; what it leaves out is None
    formula: Callable[..., Any]  # the independent formula, called with inputs and scalars by name
    activations: tuple[str, ...] = ("x",)  # in the order of the forward
    params: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()  # default: those of the op
    unread: tuple[str, ...] = ()  # outputs that nothing reads, so that their upstream gradient is None
    scalars: Mapping[str, Any] = field(default_factory=dict)  # of both passes
    forward_scalars: Mapping[str, Any] = field(default_factory=dict)  # of the forward alone
    linear_in: tuple[str, ...] = ()  # inputs in which the op is linear, up to a constant
    wide: tuple[str, ...] = ()  # results that stay in the accumulation dtype from the inputs on: no bfloat16 rounding in them
    zero_at_one: tuple[str, ...] = ()  # inputs whose gradient is zero by identity where T = 1
    shape: fixtures.Shape = SHAPE
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not self.outputs:  # a case with another op keeps the names of the reference op
            object.__setattr__(self, "outputs", self.op.outputs)

    @property
    def slot(self) -> tuple[str, ...]:
        """Of a reference op: the field of an OpSet that holds it, and its key if that is a mapping; () if none does."""
        return SLOTS.get(self.op, ())

    @property
    def family(self) -> str:
        return self.name.partition("[")[0]

    @property
    def variants(self) -> list[str]:
        return [variant for variant in self.name.partition("[")[2].rstrip("]").split(",") if variant]

    def at(self, **sizes: int) -> "OpCase":
        """The same case with other sizes."""
        shape = self.shape._replace(**sizes)
        heads = {"num_heads": shape.H, "num_kv_heads": shape.G}
        scalars = {name: heads.get(name, value) for name, value in self.forward_scalars.items()}
        return replace(self, shape=shape, forward_scalars=scalars)

    def is_zero(self, tensor: str) -> bool:
        """Whether a gradient is zero by identity at these sizes, so that it has no relative error."""
        return self.shape.T == 1 and tensor.removeprefix("d") in self.zero_at_one

    def inputs(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """The same numbers in any dtype, rounded to it."""
        built = self.build(torch.Generator().manual_seed(seed), self.shape)
        return {name: x.to(self.device, dtype if x.is_floating_point() else None) for name, x in built.items()}

    def upstream(self, point: Point, seed: int = 0) -> dict[str, Tensor]:
        """A random gradient for each output that something reads."""
        generator = torch.Generator().manual_seed(1000 + seed)
        outputs, _ = self.forward(point)
        return {name: fixtures.normal(generator, *y.shape).to(y) for name, y in outputs.items() if name not in self.unread}

    def forward(self, point: Point) -> tuple[dict[str, Tensor], Any]:
        names = (*self.activations, *self.params)
        *outputs, saved = self.op.forward(*(point.get(name) for name in names), **self.forward_scalars, **self.scalars)
        return dict(zip(self.outputs, outputs, strict=True)), saved

    def backward(self, upstream: Point, saved: Any, point: Point, dparams: Point) -> Gradients:
        """The activations' gradients; those of the parameters are added to `dparams`. A single tensor that comes back for
        two activations (add_norm) is the gradient of each."""
        dx = self.op.backward(
            *(upstream.get(name) for name in self.outputs),
            saved,
            *(point.get(name) for name in self.params),
            *(dparams.get(name) for name in self.params),
            **self.scalars,
        )
        names = [name for name in self.activations if name in point and point[name].is_floating_point()]
        returned = (dx,) * len(names) if isinstance(dx, Tensor) else dx or ()
        return dict(zip(names, returned, strict=True))

    def new_dparams(self, point: Point) -> Gradients:
        return {
            name: torch.zeros_like(point[name], dtype=accumulation_dtype(point[name])) for name in self.params if name in point
        }

    def gradients(self, point: Point, upstream: Point) -> Gradients:
        """What the op claims, for every input that has a gradient."""
        dparams = self.new_dparams(point)
        _, saved = self.forward(point)
        return {**self.backward(upstream, saved, point, dparams), **dparams}

    def formula_outputs(self, point: Point) -> dict[str, Tensor]:
        outputs = self.formula(**point, **self.forward_scalars, **self.scalars)
        return dict(zip(self.outputs, [outputs] if isinstance(outputs, Tensor) else outputs, strict=True))

    def objective(self, upstream: Point) -> Function:
        """The number whose gradient the op claims: <upstream, outputs>."""
        return lambda point: _project(upstream, self.forward(point)[0])

    def formula_objective(self, upstream: Point) -> Function:
        return lambda point: _project(upstream, self.formula_outputs(point))


def _project(upstream: Point, outputs: Point) -> Tensor:
    return torch.stack([(dy * outputs[name]).sum() for name, dy in upstream.items()]).sum()


def _simple() -> Iterator[OpCase]:
    yield OpCase("embed", EMBED, fixtures.embed, formulas.embed, ("tokens",), ("w",), linear_in=("w",), wide=("dw",))
    for name, offset in (("positions", 0), ("positions[offset]", 4)):
        options: dict[str, Any] = {"scalars": {"offset": offset}, "linear_in": ("x", "w"), "wide": ("dw",)}
        yield OpCase(name, POSITIONS, fixtures.positions, formulas.positions, params=("w",), **options)
    for name, build in (("linear", fixtures.linear), ("linear[square]", fixtures.linear_square)):
        yield OpCase(name, LINEAR, build, formulas.linear, params=("w", "b"), linear_in=("x", "w"))
    options = {"params": ("w", "b"), "linear_in": ("x", "w", "b"), "wide": ("db",)}
    yield OpCase("linear[bias]", LINEAR, fixtures.linear_bias, formulas.linear, **options)
    for name, build in (("lora", fixtures.lora), ("lora[square]", fixtures.lora_square)):
        inputs = ("x", "a", "b")
        yield OpCase(name, LORA, build, formulas.lora, inputs[:1], inputs[1:], scalars={"scale": 1.7}, linear_in=inputs)
    for name, op, build, formula in (
        ("matmul", MATMUL, fixtures.matmul, formulas.matmul),
        ("broadcast[add]", ADD, fixtures.broadcast, formulas.add),
        ("broadcast[mul]", MUL, fixtures.broadcast, formulas.mul),
    ):
        yield OpCase(name, op, build, formula, ("a", "b"), linear_in=("a", "b"))
    yield OpCase("softmax", SOFTMAX, fixtures.logits, formulas.softmax)
    yield OpCase("softmax[log]", LOG_SOFTMAX, fixtures.logits, formulas.log_softmax)
    yield OpCase("softcap", SOFTCAP, fixtures.logits, formulas.capped, scalars={"cap": 5.0})
    scalars = {"p": 0.3, "key": dropout_key(1, 2, "cases"), "first_sample": 3}
    yield OpCase("dropout", DROPOUT, fixtures.dropout, formulas.dropout, scalars=scalars, linear_in=("x",))


def _feed_forward() -> Iterator[OpCase]:
    pointwise = {"sigmoid": SIGMOID, "silu": SILU, "tanh": TANH, "gelu": GELU, "relu": RELU, "relu2": RELU2}
    for kind, op in pointwise.items():
        yield OpCase(f"pointwise[{kind}]", op, fixtures.pointwise, formulas.POINTWISE[kind])
    gates = {"swiglu": SWIGLU, "geglu": GEGLU}
    for kind, op in gates.items():
        yield OpCase(f"ffn_gate[{kind}]", op, fixtures.gate_up, formulas.GATES[kind], ("gate_up",))
    for kind in ("tanh", "gelu", "relu", "relu2", *gates):
        formula = partial(formulas.ffn_down, kind)
        options: dict[str, Any] = {"activations": ("gate_up",), "params": ("w", "b")}
        plain, bias = (partial(fixtures.ffn_down, gated=kind in gates, bias=bias) for bias in (False, True))
        yield OpCase(f"ffn_down[{kind}]", FFN_DOWN[kind], plain, formula, linear_in=("w",), **options)
        yield OpCase(f"ffn_down[{kind},bias]", FFN_DOWN[kind], bias, formula, linear_in=("w", "b"), wide=("db",), **options)
    options = {"scalars": {"scale": 1.7, "linear": FFN_DOWN["swiglu"]}, "linear_in": ("a", "b")}
    yield OpCase("lora[down]", LORA, fixtures.lora_down, formulas.lora_swiglu, ("gate_up",), ("a", "b"), **options)


def _norms() -> Iterator[OpCase]:
    eps = {"eps": fixtures.EPS}
    for name, op, build, formula, params, wide in (
        ("rms_norm", RMS_NORM, fixtures.norm, formulas.rms_norm, ("w",), ("dw",)),
        ("layer_norm", LAYER_NORM, fixtures.norm, formulas.layer_norm, ("w", "b"), ("dw",)),
        ("layer_norm[bias]", LAYER_NORM, fixtures.norm_bias, formulas.layer_norm, ("w", "b"), ("dw", "db")),
    ):
        yield OpCase(name, op, build, formula, params=params, forward_scalars=eps, wide=wide)
    rms = (ADD_RMS_NORM, partial(formulas.add_norm, formulas.rms_norm), ("w",))
    layer = (ADD_LAYER_NORM, partial(formulas.add_norm, formulas.layer_norm), ("w", "b"))
    for variant, (op, add_formula, params), build, unread in (
        ("rms", rms, fixtures.add_norm, ()),
        ("rms,first", rms, fixtures.norm, ()),
        ("rms,last", rms, fixtures.add_norm, ("s",)),
        ("layer", layer, fixtures.add_norm, ()),
        ("layer,bias", layer, fixtures.add_norm_bias, ()),
        ("layer,bias,first,last", layer, fixtures.norm_bias, ("s",)),
    ):
        options: dict[str, Any] = {"unread": unread, "forward_scalars": eps}
        yield OpCase(f"add_norm[{variant}]", op, build, add_formula, ("x", "delta"), params, **options)


def _attention() -> Iterator[OpCase]:
    for name, offset in (("rope", 0), ("rope[offset]", 5)):
        yield OpCase(name, ROPE, fixtures.rope, formulas.rope, scalars={"theta": 100.0, "offset": offset}, linear_in=("x",))
    weights = ("wq_norm", "wk_norm")
    heads = {"num_heads": SHAPE.H, "num_kv_heads": SHAPE.G, "eps": fixtures.EPS}
    for variant, build, theta, offset in (
        ("rope", fixtures.qkv, 100.0, 5),
        ("split", fixtures.qkv, None, 0),
        ("norm,rope", fixtures.qkv_norm, 100.0, 5),
        ("norm", fixtures.qkv_norm, None, 0),
    ):
        options: dict[str, Any] = {"scalars": {"theta": theta, "offset": offset}, "forward_scalars": heads}
        options["linear_in"] = () if "norm" in variant else ("qkv",)
        options["wide"] = ("dwq_norm", "dwk_norm") if variant == "norm" else ()
        yield OpCase(f"qkv_rope[{variant}]", QKV_ROPE, build, formulas.qkv_rope, ("qkv",), weights, **options)
    for variant, attention in fixtures.ATTENTION.items():
        options = {"linear_in": ("v",), "zero_at_one": () if variant == "cache" else ("q", "k")}
        inputs = ("q", "k", "v", "documents")
        yield OpCase(f"attention[{variant}]", ATTENTION, attention, formulas.attention, inputs, **options)


def _losses() -> Iterator[OpCase]:
    options: dict[str, dict[str, Any]] = {
        "smoothing": {"label_smoothing": 0.1},
        "z": {"z_loss": 0.02},
        "softcap": {"softcap": 5.0},
        "count": {"num_targets": 19},
    }
    every = {name: value for option in options.values() for name, value in option.items()}
    names = ",".join(options)
    for variant, scalars in {"": {}, **{f"[{name}]": option for name, option in options.items()}, f"[{names}]": every}.items():
        inputs = ("logits", "targets")
        build, formula = fixtures.cross_entropy, formulas.cross_entropy
        yield OpCase(f"cross_entropy{variant}", CROSS_ENTROPY, build, formula, inputs, scalars=scalars, wide=("loss",))
    for variant, op, scalars in (
        ("", LINEAR_CROSS_ENTROPY, {}),
        ("[chunks]", IN_CHUNKS, {}),
        (f"[chunks,{names}]", IN_CHUNKS, every),
    ):
        fused, inputs = formulas.linear_cross_entropy, ("x", "targets")
        yield OpCase(
            f"linear_cross_entropy{variant}", op, fixtures.linear_cross_entropy, fused, inputs, ("w",), scalars=scalars
        )


CASES = (*_simple(), *_feed_forward(), *_norms(), *_attention(), *_losses())


def cases(only: str | None = None) -> tuple[OpCase, ...]:
    """All of them, or those that answer to a name: an op (`attention`), a variant (`gqa`) or a case (`attention[gqa]`)."""
    if only is None:
        return CASES
    named = tuple(case for case in CASES if only in (case.name, case.family))
    chosen = named or tuple(case for case in CASES if only in case.variants)
    if not chosen:
        known = {label for case in CASES for label in (case.name, case.family, *case.variants)}
        raise ConfigError(f"no op is named {only!r}; {nearest(only, sorted(known))}")
    return chosen


def cases_of(ops: OpSet, device: str = "cpu", only: str | None = None) -> Iterator[OpCase]:
    """The cases of every op that a set has, with the set's own ops in them."""
    for case in cases(only):
        if case.slot:
            name, *kind = case.slot
            op = getattr(ops, name)
            yield replace(case, op=op[kind[0]] if kind else op, device=device)
