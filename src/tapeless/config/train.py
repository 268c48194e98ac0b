"""How a model is trained: data, optimizer, schedule, evaluation, checkpoints, logging.

Tested by: tests/test_config.py."""

from dataclasses import dataclass, replace

from tapeless.config.fields import INFINITY, check_fields, nearest, option, require, seconds
from tapeless.config.model import Lora
from tapeless.config.registry import OPTIMIZERS, REPORTERS
from tapeless.errors import WARMUP_TOO_LONG, ConfigError

FUNCTION = "function"  # lr_schedule of a run whose learning rate is a function of its caller; also, in [data], its batches


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained: data, optimizer, schedule, evaluation, checkpoints, logging."""

    dataset_path: str | None = option(
        None,
        "text: a file, a directory, a glob, JSONL (texts or instructions), Parquet, a Hugging Face dataset (its directory, or "
        "hf:owner/name); or tokens: a directory of `tapeless data prepare`, nanoGPT or llm.c",
        common=True,
    )
    val_path: str | None = option(None, "validation text, likewise; default: a tenth of the data is held out")
    text_field: str = option("text", "JSONL field or table column that holds the text")
    corpus: str = option(
        "stdlib",
        "data if dataset_path is not given: Python's standard library, its docstrings, or a synthetic source of known entropy",
        ("stdlib", "stdlib-docs", "markov", "arithmetic"),
    )
    tokenizer: str = option(
        "bytes",
        "bytes, char, bpe (trained on the data to vocab_size), or the path of a tokenizer.json; bpe has special tokens for the "
        "end of a text and for chat, and so have bytes+chat and char+chat",
        common=True,
    )
    init_from: str | None = option(
        None, "a run or a Hugging Face directory to take model, initial weights and tokenizer from", common=True
    )
    freeze: str = option("", "frozen parameters: comma-separated name patterns such as embed*,blocks.0.*")
    lora_rank: int = option(
        0, "train LoRA adapters of this rank on the frozen model of init_from; 0: train the model itself", ge=0
    )
    lora_alpha: float | None = option(None, "LoRA output is scaled by alpha / rank; default twice the rank", gt=0)
    lora_targets: str = option("wq,wv", "matrices with an adapter; all-linear, or names separated by commas")
    seq_len: int | None = option(None, "tokens in a training window [T]; default max_seq_len", ge=1)
    document_attention: bool = option(False, "mask attention and loss across the documents in a window")
    batch_size: int = option(8, "windows per micro-batch [B]", ge=1, common=True)
    grad_accum: int = option(1, "micro-batches per step (gradient accumulation)", ge=1)
    micro_batches: int | None = option(
        None,
        "equal parts of the batch_size x grad_accum rows of a step, whose gradients are computed one by one, or by as many "
        "ranks; default grad_accum, or the number of ranks if that is more",
        ge=1,
    )
    rank_invariant: bool | None = option(
        None,
        "sum the gradients of micro-batches in one order, so that any number of ranks gives the same bits; default on a CPU; "
        "on a GPU it implies deterministic",
    )
    epochs: int | None = option(None, "passes over the data; the run ends at epochs or max_steps, whichever comes first", ge=1)
    max_steps: int | None = option(None, "training steps; default 1000 if epochs is not given", ge=1, common=True)
    max_time: str = option("0", "save and stop after this time, to be resumed: 90s, 10m, 2h; 0: no limit", common=True)
    optimizer: str = option("adamw", "which optimizer", OPTIMIZERS)
    lr: float = option(2e-3, "peak learning rate", common=True)
    min_lr: float | None = option(None, "learning rate at the end of a decaying schedule; default lr / 10")
    lr_schedule: str = option(
        "warmup-cosine",
        "learning-rate schedule; function: one of your own, from Python",
        ("warmup-cosine", "constant", "linear", "cosine", "wsd", "step", "polynomial", "restarts", FUNCTION),
    )
    warmup_steps: int | None = option(
        None, "linear warm-up steps; default for warmup-cosine 5 % of the steps, at most 100, else 0", ge=0
    )
    weight_decay: float = option(0.1, "weight decay of the matrices", ge=0)
    beta1: float = option(
        0.9, "decay of the first moment (adam, adamw; muon: all but hidden matrices)", by_optimizer=True, ge=0, lt=1
    )
    beta2: float = option(0.95, "decay of the second moment (likewise)", by_optimizer=True, ge=0, lt=1)
    eps: float = option(1e-8, "added to the root of the second moment (likewise)", by_optimizer=True, gt=0)
    momentum: float = option(0.9, "momentum (sgd, muon)", by_optimizer=True, ge=0, lt=1)
    nesterov: bool | None = option(None, "Nesterov momentum (sgd: default no; muon: default yes)", by_optimizer=True)
    grad_clip: float = option(1.0, "clip the global gradient norm to this; 0: no clipping", ge=0)
    spike_z: float = option(
        20.0, "skip an update if its loss is this many robust standard deviations above recent losses; 0: never", ge=0
    )
    check_invariants_every: int = option(
        0, "steps between checks of identities that every correct gradient satisfies; 0: never", ge=0
    )
    ema_decay: float = option(0.0, "decay of an exponential moving average (EMA) of the weights; 0: none", ge=0, lt=1)
    seed: int = option(0, "seed of weights, data order, dropout and samples", ge=0, common=True)
    device: str = option("cpu", "torch device: cpu, cuda, mps", common=True)
    dtype: str = option(
        "float32",
        "compute dtype; bfloat16 and fp8 keep float32 master weights; fp8: matmuls of the blocks in 8 bits, on GPUs that "
        "support it; auto: bfloat16 if its matmuls are a fifth faster on this machine, else float32",
        ("auto", "float32", "bfloat16", "fp8", "float64"),
        common=True,
    )
    threads: int | None = option(None, "CPU threads of torch and the kernels; default torch's", ge=1)
    ops: str = option("auto", "op set: auto, reference (plain torch), cpu (Numba), triton, or a registered one")
    recompute: str = option(
        "none",
        "activation recomputation in backward to save memory; cheap: norms, full: whole blocks from their inputs",
        ("none", "cheap", "full"),
    )
    deterministic: bool = option(False, "deterministic GPU libraries, at some cost in speed; the CPU is always deterministic")
    out_dir: str | None = option(None, "run directory; default a new one in runs/", common=True)
    eval_every: int = option(100, "steps between evaluations; 0: only at the end", ge=0)
    eval_windows: int = option(64, "validation windows per evaluation, always the same ones; 0: all", ge=0)
    patience: int = option(0, "stop after this many evaluations in a row without a new best; 0: never", ge=0)
    save_every: int = option(200, "steps between checkpoints; the last step is always saved", ge=1)
    keep_last: int = option(
        2,
        "number of newest checkpoints to keep; also kept: the best, and the one that a resume began from until the next resume",
        ge=1,
    )
    keep_every: int = option(0, "also keep checkpoints at multiples of this many steps; 0: none", ge=0)
    log_every: int = option(10, "steps between console lines; metrics.jsonl has every step", ge=1)
    sample_every: int = option(500, "steps between samples; 0: only at the end", ge=0)
    sample_tokens: int = option(100, "tokens per sample", ge=0, lt=10**6)
    sample_prompt: str = option("", "prompt of samples; default: the first token of the validation part")
    sample_temperature: float = option(0.8, "sampling temperature; 0: greedy", ge=0)
    layer_stats_every: int = option(
        50, "steps between measurements of memory and of each layer's gradient and update; 0: never", ge=0
    )
    report_to: str = option("html", f"comma-separated loggers: {', '.join(REPORTERS)}; or none")
    verify: bool = option(True, "check the gradients of the first batch before the first step")

    def __post_init__(self) -> None:
        check_fields(self)
        require(0 < self.lr < INFINITY, "lr", "a number above 0", self.lr)
        require(self.min_lr is None or 0 <= self.min_lr <= self.lr, "min_lr", f"between 0 and lr = {self.lr}", self.min_lr)
        rows, parts = self.batch_size * self.grad_accum, self.num_micro_batches
        require(rows % parts == 0, "micro_batches", f"a divisor of the {rows} rows of a step", parts)
        if self.warmup_steps is not None and self.max_steps is not None and self.warmup_steps > self.max_steps:
            raise WARMUP_TOO_LONG(warmup=self.warmup_steps, total=f"max_steps {self.max_steps}", most=self.max_steps)
        seconds(self.max_time)
        if self.lora_rank and not self.init_from:
            raise ConfigError("lora_rank adapts an existing model: name it with init_from")
        if self.lora_rank and self.freeze:
            raise ConfigError("lora_rank freezes everything but its adapters: leave out freeze")
        for name in self.report_to.split(",") if self.report_to != "none" else ():
            if name == "none":
                raise ConfigError(f"report_to {self.report_to!r}: none cannot be combined; remove it or the others")
            if name not in REPORTERS:
                raise ConfigError(f"report_to {name!r} is unknown; {nearest(name, (*REPORTERS, 'none'))}")
        require(not self.nesterov or self.momentum > 0, "momentum", "above 0 for nesterov", self.momentum)

    @property
    def num_micro_batches(self) -> int:
        """Parts of a step, whose gradients are computed one after the other or on several ranks."""
        return self.micro_batches or self.grad_accum

    @property
    def micro_batch_size(self) -> int:
        """Rows of each."""
        return self.batch_size * self.grad_accum // self.num_micro_batches

    @property
    def repeatable(self) -> bool:
        """Whether deterministic libraries are asked for."""
        return self.deterministic or (self.device != "cpu" and self.sums_in_order)

    def accumulated(self) -> "TrainConfig":
        """The same steps, with batch_size rows in each micro-batch."""
        return replace(self, batch_size=self.micro_batch_size, grad_accum=self.num_micro_batches, micro_batches=None)

    @property
    def sums_in_order(self) -> bool:
        """Whether the sum of their gradients is the same on any number of ranks."""
        return self.device == "cpu" if self.rank_invariant is None else self.rank_invariant

    @property
    def lora(self) -> Lora | None:
        alpha = 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha
        return Lora(self.lora_rank, alpha, self.lora_targets) if self.lora_rank else None
