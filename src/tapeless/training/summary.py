"""Text descriptions of a run: rows of a label and a text, for the display and for `train info`.

Tested by: tests/train/test_display.py, tests/train/test_info.py."""

import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch

from tapeless.config import FUNCTION, OPTIMIZERS, AnyModelConfig, ModelConfig, TrainConfig
from tapeless.data.baselines import Baselines
from tapeless.data.chat import FILE as CHAT_TEMPLATE
from tapeless.data.loader import ExampleLoader
from tapeless.data.prepare import Dataset
from tapeless.interop.targets import export_targets
from tapeless.model.build import AnyModel
from tapeless.model.params import count_params
from tapeless.model.transformer import Transformer
from tapeless.plugins import plugin_flags
from tapeless.text import Row
from tapeless.training.run_dir import resume_command
from tapeless.training.trainer import Trainer


def introduction(run: Path | None, trainer: Trainer, baselines: Baselines) -> list[Row]:
    """Everything that is known before the first step."""
    model, data, c = trainer.model, trainer.data, trainer.config
    at = f", resumed at step {trainer.steps:,}" if trainer.resumed_from is not None else ""
    threads = f", {count(torch.get_num_threads(), 'thread')}" if model.device.type == "cpu" else ""
    ops = "reference (SimpleLM is a Chain of them)"
    if isinstance(model, Transformer):
        ops = f"{model.ops.name} ({model.ops_reason})"
    decaying, others = decay_groups(model.grads, trainer.optimizer.decay)
    return [
        ("run", f"{run}{at}" if run else f"not saved{at}"),
        ("model", model_text(model.config, model.num_params)),
        *trained_text(model),
        ("data", f"{data.source}; {len(data.train):,} training tokens, {len(data.val):,} validation tokens{left_out(trainer)}"),
        ("tokenizer", tokenizer_text(data, model.config.vocab_size)),
        ("ops", f"{ops}; {model.dtype} on {model.device}{threads}"),
        ("steps", steps_text(trainer)),
        ("optimizer", optimizer_text(c)),
        (
            "decay",
            (f"{c.weight_decay:g} on {decaying}" + (f"; none on {others}" if others else "")) if c.weight_decay else "none",
        ),
        ("export", export_targets(model.config, data.tokenizer)),
        ("baselines", ", ".join(f"{name} {value:.4f}" for name, value in named_losses(data, baselines))),
    ]


def trained_text(model: AnyModel) -> list[Row]:
    """Which parameters train, if not all of them."""
    store = model.store
    if store.trained is store.layout:
        return []
    lora = getattr(model, "lora", None)
    what = f"adapters of rank {lora.rank} on {lora.targets}, scale {lora.scale:g}" if lora else "all that is not frozen"
    return [("trains", f"{count_params(store.trained.specs.values()):,} parameters: {what}")]


def left_out(trainer: Trainer) -> str:
    loader = trainer.loader
    if not isinstance(loader, ExampleLoader) or not loader.examples.left_out:
        return ""
    return f"; {loader.examples.left_out:,} of {loader.examples.num_examples:,} examples skipped: no completion inside a window"


def named_losses(data: Dataset, baselines: Baselines) -> list[tuple[str, float]]:
    """The baselines, worst first, and the entropy of the source if it is known."""
    floor = [] if data.floor is None else [("entropy of the source", data.floor)]
    b = baselines
    return [(f"ln {data.tokenizer.vocab_size}", b.uniform), ("unigram", b.unigram), ("bigram", b.bigram), *floor]


def model_text(config: AnyModelConfig, parameters: int | None) -> str:
    size = "" if parameters is None else f"{parameters:,} parameters: "
    c = config
    if not isinstance(c, ModelConfig):
        return f"{size}SimpleLM, width {c.hidden_dim}, hidden layer {c.intermediate_dim}, vocabulary {c.vocab_size:,}"
    heads = count(c.num_heads, "head") + (f" with {c.num_kv_heads} KV heads" if c.num_kv_heads != c.num_heads else "")
    norm = f"{'RMSNorm' if c.norm == 'rms' else 'LayerNorm'} {'before' if c.norm_placement == 'pre' else 'after'} each sublayer"
    position = {"rope": "rotary positions", "learned": "learned positions", "none": "no positions"}[c.position]
    parts = [
        f"{count(c.num_layers, 'layer')} of width {c.hidden_dim}",
        heads,
        f"{c.ffn} {c.intermediate_dim}",
        norm,
        position,
        f"vocabulary {c.vocab_size:,}{' (tied)' if c.tie_embeddings else ''}",
        f"up to {c.max_seq_len:,} tokens",
        *([f"dropout {c.dropout:g}"] if c.dropout else []),
    ]
    return size + ", ".join(parts)


def tokenizer_text(data: Dataset, vocab_size: int) -> str:
    t = data.tokenizer
    spare = vocab_size - t.vocab_size
    unused = f"; the model has {vocab_size:,}: {spare:,} are unused" if spare else ""
    text = "validation text" if data.roles is None else "validation completions, their ends included"
    return f"{t.kind}, {t.vocab_size:,} ids, {data.bytes_per_token:.2f} bytes per token of the {text}{unused}"


def steps_text(trainer: Trainer) -> str:
    c, total = trainer.config, trainer.total_steps
    rows = f"{c.batch_size} x {trainer.seq_len}" + (f" x {c.grad_accum} micro-batches" if c.grad_accum > 1 else "")
    tokens = c.batch_size * c.grad_accum * trainer.seq_len
    epochs = "batches of your own"
    if trainer.loader.num_windows:
        epochs = f"{total * trainer.loader.batch_size / trainer.loader.num_windows:.3g} epochs"
    warmup = f"{trainer.warmup_steps:,} warm-up steps" if trainer.warmup_steps else "no warm-up"
    limit = "" if c.max_time == "0" else f"; this process stops after {c.max_time}"
    return f"{total:,} of {rows} = {tokens:,} tokens, {epochs}; {warmup}{limit}"


def optimizer_text(c: TrainConfig) -> str:
    last = c.lr / 10 if c.min_lr is None else c.min_lr
    rate = f"lr {c.lr:g}, {c.lr_schedule}" + ("" if c.lr_schedule == "constant" else f" to {last:g}")
    if c.lr_schedule == FUNCTION:
        rate = "lr a function of the step"
    values = []
    if c.optimizer in OPTIMIZERS:  # and not of a plugin that is not loaded
        optimizer = OPTIMIZERS[c.optimizer]
        values = [(name, optimizer.config_options(c)[name]) for name in optimizer.options]
    options = [name if value is True else f"{name} {value:g}" for name, value in values if value]
    clip = f"gradient norm clipped at {c.grad_clip:g}" if c.grad_clip else "no clipping"
    average = f"weights averaged with decay {c.ema_decay:g}" if c.ema_decay else ""
    return ", ".join(part for part in (c.optimizer, *options, rate, clip, average) if part)


def decay_groups(names: Iterable[str], decay: Iterable[str]) -> tuple[str, str]:
    """Parameters with and without weight decay, blocks grouped: `embed.w, attn.{wq wk wv wo}`."""
    decaying = set(decay)
    groups: tuple[dict[str, list[str]], dict[str, list[str]]] = ({}, {})
    for name in names:
        owner, _, leaf = re.sub(r"^blocks\.\d+\.", "", name).rpartition(".")
        leaves = groups[name not in decaying].setdefault(owner, [])
        if leaf not in leaves:
            leaves.append(leaf)
    return _grouped(groups[0]), _grouped(groups[1])


def _grouped(group: dict[str, list[str]]) -> str:
    leaves = {owner: names[0] if len(names) == 1 else f"{{{' '.join(names)}}}" for owner, names in group.items()}
    return ", ".join(f"{owner}.{leaf}" for owner, leaf in leaves.items())


def try_command(run: Path, options: str = "--temperature 0.7") -> Row:
    """How to see what a model says. options: of generate."""
    path = shlex.quote(str(run))
    if (run / CHAT_TEMPLATE).exists():
        return f"tapeless chat {path}", "talk to it"
    return f"tapeless generate {path} {options}", "generate text"


def next_commands(
    run: Path, ending: str, total_steps: int, functions: Collection[str] = (), plugins: Mapping[str, str] | None = None
) -> list[Row]:
    """Suggested commands and their purpose. ending: done, early, or anything else for a run that can be resumed. functions: the
    arguments of tapeless.resume that the run needs. plugins: those that it records."""
    path, ended, plugins = shlex.quote(str(run)), ending in ("done", "early"), plugins or {}
    more = {"max_steps": 2 * total_steps} if ended else {}
    again = resume_command(run, functions, **more) + ("" if functions else plugin_flags(plugins, training=True))
    resume = (again, "train for longer" if ended else "continue as if it had not been interrupted")
    command, what = try_command(run)
    load = plugin_flags(plugins, training=False)
    others = [
        (command + load, what),
        (f"tapeless eval {path} --checkpoint best{load}", "evaluate on the whole validation text"),
    ]
    return [*others, resume] if ended else [resume, *others]


def command_lines(commands: list[Row]) -> list[str]:
    width = max(len(command) for command, _ in commands)
    return [f"{command:<{width}}   # {what}" for command, what in commands]


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration(seconds: float) -> str:
    """41 s, 3 min 20 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60:02d} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60:02d} min"
