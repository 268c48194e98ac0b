"""One thing to measure: who does what, with which model, on how many tokens. It travels to the worker as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tapeless.config import DEFAULT_BLOCKS, KINDS, AnyModelConfig, ModelConfig, TrainConfig, nearest, require
from tapeless.errors import ConfigError
from tapeless.plugins import LOADED, load_plugin

OURS, REPEATABLE, FLOOR = "ours", "deterministic", "floor"
OUR_OWN = (OURS, REPEATABLE)  # the trainer's step, in both of its forms
COMPILED = {"compile": "default", "reduce-overhead": "reduce-overhead", "max-autotune": "max-autotune"}  # torch.compile's modes
PEERS = ("eager", *COMPILED, "hf")
CONTENDERS = (OURS, REPEATABLE, *PEERS, FLOOR)
GPU_ONLY = (REPEATABLE, "reduce-overhead", "max-autotune")
USUAL = {"cpu": (OURS, "eager", "compile", "hf", FLOOR), "cuda": (OURS, REPEATABLE, "eager", *COMPILED, FLOOR)}
DTYPES = ("float32", "bfloat16", "fp8")
PROMPT = 16  # tokens that a generation continues


class Batch(NamedTuple):
    tokens: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64


@dataclass(frozen=True)
class Task:
    contender: str
    model: AnyModelConfig
    train: TrainConfig  # with a seq_len
    new_tokens: int = 0  # 0: a training step; else a generation of this many tokens

    def __post_init__(self) -> None:
        if self.contender not in CONTENDERS:
            raise ConfigError(f"unknown contender {self.contender!r}; {nearest(self.contender, CONTENDERS)}")
        if self.contender in GPU_ONLY and torch.device(self.train.device).type != "cuda":
            raise ConfigError(f"{self.contender} differs from its plain form on a GPU alone; leave it out, or --device cuda")
        if self.train.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.train.dtype!r} is not measured; {nearest(self.train.dtype, DTYPES)}")
        if self.train.dtype == "fp8" and self.contender not in OUR_OWN:
            raise ConfigError(f"{self.contender} has no fp8; it is measured in bfloat16, beside ours in fp8")
        if getattr(self.model, "dropout", 0):
            raise ConfigError(
                "contenders draw dropout masks in their own ways, so that losses could not be compared; --dropout 0"
            )
        if isinstance(self.model, ModelConfig) and self.contender in PEERS and self.model.blocks != DEFAULT_BLOCKS:
            raise ConfigError(
                f"{self.contender} has no sublayers other than {DEFAULT_BLOCKS}; measure --contenders {OURS} alone"
            )
        if isinstance(self.model, ModelConfig):
            longest = self.model.max_seq_len
            require(self.seq_len <= longest, "seq_len", f"at most max_seq_len = {longest}", self.seq_len)

    @property
    def label(self) -> str:
        return f"{self.contender} {self.train.dtype}"

    @property
    def seq_len(self) -> int:
        assert self.train.seq_len is not None
        return self.train.seq_len

    @property
    def tokens(self) -> int:
        """What one unit of work reads or writes."""
        return self.new_tokens or self.train.batch_size * self.seq_len

    @property
    def compute(self) -> torch.dtype:
        return torch.float32 if self.train.dtype == "float32" else torch.bfloat16

    def by(self, contender: str, dtype: str) -> "Task":
        return replace(self, contender=contender, train=replace(self.train, dtype=dtype))

    def batch(self, step: int) -> Batch:
        """Tokens without any order, another batch each step: nothing can be learned, so that numbers stay ordinary ones."""
        generator = torch.Generator().manual_seed(step)
        shape = (self.train.batch_size, self.seq_len + 1)
        ids = torch.randint(0, self.model.vocab_size, shape, generator=generator).to(self.train.device)
        return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())

    def prompt(self) -> list[int]:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, self.model.vocab_size, (PROMPT,), generator=generator).tolist()

    def as_json(self) -> dict[str, Any]:
        kind = next(name for name, cls in KINDS.items() if isinstance(self.model, cls))
        return {**asdict(self), "kind": kind, "plugins": list(LOADED)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Task":
        for path in data["plugins"]:
            load_plugin(path)
        model, train = KINDS[data["kind"]](**data["model"]), TrainConfig(**data["train"])
        return Task(data["contender"], model, train, data["new_tokens"])


def measured(train: TrainConfig, seq_len: int) -> TrainConfig:
    """The training that every contender does: AdamW, one micro-batch a step. A small constant rate keeps any model finite; it
    costs the same time as any other."""
    return replace(train, seq_len=seq_len, optimizer="adamw", grad_accum=1, lr=1e-4, min_lr=None)


class Contender:
    """What is measured. `step` is one unit of work; what it returns must agree between contenders: the loss, or the tokens."""

    def prepare(self, step: int) -> None:
        """The inputs of a step, which are not timed; nothing if every step is the same."""

    def step(self) -> Any:
        raise NotImplementedError

    def parts(self) -> dict[str, int]:
        """Bytes that are known by name."""
        return {}

    def facts(self) -> dict[str, Any]:
        """Further results, asked for when everything is measured."""
        return {}
