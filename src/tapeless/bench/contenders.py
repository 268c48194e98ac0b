"""The contenders: each does one unit of work, a training step or a generation, the way its own users would."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from tapeless.bench.device import is_cuda
from tapeless.bench.floor import Floor
from tapeless.bench.hf import HFGeneration, HFLoss, build_hf, load_library
from tapeless.bench.peer import build_peer
from tapeless.bench.task import COMPILED, FLOOR, OUR_OWN, OURS, PEERS, REPEATABLE, Contender, Task
from tapeless.bench.weights import fill
from tapeless.config import ModelConfig, Sampling, TrainConfig
from tapeless.errors import ConfigError
from tapeless.generate.engine import generate
from tapeless.kernels.choose import choose
from tapeless.kernels.determinism import enable_determinism
from tapeless.model.build import AnyModel, build_model
from tapeless.model.memory import saved_bytes
from tapeless.model.transformer import Transformer
from tapeless.training.captured_step import captured_step
from tapeless.training.step import optimizer_of, train_step


class Ours(Contender):
    """What the trainer does."""

    def __init__(self, task: Task):
        self.task, self.steps = task, 0
        self.model = our_model(task)
        self.optimizer = optimizer_of(self.model, task.train)
        self.captured = captured_step(self.model, self.optimizer, task.train)

    def prepare(self, step: int) -> None:
        self.steps, self.batch = step, self.task.batch(step)

    def step(self) -> float:
        c = self.task.train
        if self.captured is not None:
            return self.captured(*self.batch, lr=c.lr, step=self.steps).loss
        options: dict[str, Any] = {"lr": c.lr, "grad_clip": c.grad_clip, "grad_accum": 1}
        return train_step(self.model, self.optimizer, *self.batch, **options, step=self.steps, first_sample=0).loss

    def parts(self) -> dict[str, int]:
        store, task = self.model.store, self.task
        parts = {
            "parameters": store.flat.nbytes,
            "gradients": store.flat_grads.nbytes,
            "moments": sum(state.nbytes for state in self.optimizer.state.values()),
        }
        if store.compute_flat is not store.flat:
            parts["bfloat16 copy"] = store.compute_flat.nbytes
        if isinstance(task.model, ModelConfig):
            shape = (task.train.batch_size, task.seq_len)
            parts["saved activations"] = sum(saved_bytes(task.model, *shape, task.train.recompute, task.train.dtype).values())
        return parts

    def facts(self) -> dict[str, Any]:
        return {"ops": self.model.ops.name} if isinstance(self.model, Transformer) else {}


class OurGeneration(Contender):
    def __init__(self, task: Task):
        self.task, self.model = task, our_model(task)

    def step(self) -> list[int]:
        greedy = Sampling(temperature=0)
        return generate(self.model, self.task.prompt(), max_tokens=self.task.new_tokens, sampling=greedy)[0]

    def parts(self) -> dict[str, int]:
        return {"parameters": self.model.store.flat.nbytes}


class TorchTraining(Contender):
    """A training loop as it is written everywhere, around any module that maps tokens and targets to a loss."""

    def __init__(self, task: Task, module: nn.Module, *, mode: str | None = None):
        """mode: of torch.compile; None is eager."""
        self.task, c = task, task.train
        self.params = list(module.parameters())
        groups = [
            {"params": [w for w in self.params if w.dim() >= 2], "weight_decay": c.weight_decay},
            {"params": [w for w in self.params if w.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=c.lr, betas=(c.beta1, c.beta2), eps=c.eps, fused=True)
        self.module = module if mode is None else torch.compile(module, mode=mode)

    def prepare(self, step: int) -> None:
        self.batch = self.task.batch(step)

    def step(self) -> Tensor:  # ()
        c = self.task.train
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(torch.device(c.device).type, torch.bfloat16, enabled=c.dtype == "bfloat16"):
            loss = self.module(*self.batch)
        loss.backward()
        if c.grad_clip:
            nn.utils.clip_grad_norm_(self.params, c.grad_clip)
        self.optimizer.step()
        return loss.detach()

    def parts(self) -> dict[str, int]:
        size = sum(w.nbytes for w in self.params)
        return {"parameters": size, "gradients": size, "moments": 2 * size}


def our_model(task: Task) -> AnyModel:
    c = task.train
    options: dict[str, Any] = {"seed": c.seed, "device": c.device, "dtype": c.dtype}
    if isinstance(task.model, ModelConfig):
        options |= {"ops": c.ops, "recompute": c.recompute}
    return build_model(task.model, **options)


def load_libraries(task: Task) -> None:
    """Import everything first: the memory of a model is counted on top of its libraries."""
    c: TrainConfig = task.train
    if task.contender in OUR_OWN:
        choose(c.ops, torch.device(c.device), c.dtype)
    elif task.contender in PEERS:
        import_module("torch._dynamo")  # which torch.optim loads with its first optimizer
    if task.contender in COMPILED:
        import_module("torch._inductor.compile_fx")
    if task.contender == "hf":
        load_library(task.model)
    if is_cuda(c.device):
        torch.empty(1, device=c.device)


def build(task: Task) -> Contender:
    if task.new_tokens:
        generators: dict[str, Any] = {OURS: OurGeneration, "hf": HFGeneration}
        if task.contender not in generators:
            raise ConfigError(f"{task.contender} does not generate; ours and hf do")
        return generators[task.contender](task)
    if task.contender == REPEATABLE:
        enable_determinism()
    if task.contender in OUR_OWN:
        return Ours(task)
    if task.contender == FLOOR:
        return Floor(task)
    if task.contender == "hf":
        assert isinstance(task.model, ModelConfig)
        return TorchTraining(task, HFLoss(build_hf(task), task.model))
    peer = build_peer(task.model)
    fill(peer, task.model, task.train.seed)
    return TorchTraining(task, peer.to(task.train.device), mode=COMPILED.get(task.contender))
