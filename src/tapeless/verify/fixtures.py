"""Models and batches that expose bugs: small sizes, all different, and no special values.

At initialisation norms are 1 and biases 0, so a backward that forgets them looks right; with square matrices a transpose is
invisible, and with all targets valid so is a wrong divisor. The fixtures avoid all of these."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tapeless.config import AnyModelConfig, Lora, ModelConfig, SimpleLMConfig
from tapeless.model.block import build_blocks
from tapeless.model.build import AnyModel, build_model
from tapeless.model.init import param_seed
from tapeless.model.transformer import Transformer

# Letters: docs/notation.md. B = 3 leaves room for a sample of nothing but padding. C is 24 or 22.
B, T, H, D, F, V = 3, 7, 4, 6, 13, 23
SEED, STEP, FIRST_SAMPLE = 0, 5, 3  # what drives dropout; the last two are not 0, so that one left out shows
TINY_TOKEN = 3  # its embedding is so short that eps matters in the first norm


class Setting(NamedTuple):
    """What a model runs with: a set of ops by its name, and a device. By default the reference implementation."""

    ops: str = "reference"
    device: str = "cpu"

    def __str__(self) -> str:
        return f"ops {self.ops} on {self.device}"


ON_REFERENCE = Setting()


class Batch(NamedTuple):
    tokens: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64
    documents: Tensor | None = None  # (B, T) int64

    def samples(self, *index: int) -> "Batch":
        """Some of the rows, in this order."""
        i = list(index)
        return Batch(self.tokens[i], self.targets[i], None if self.documents is None else self.documents[i])

    def to(self, device: str | torch.device) -> "Batch":
        documents = None if self.documents is None else self.documents.to(device)
        return Batch(self.tokens.to(device), self.targets.to(device), documents)


class ModelCase(NamedTuple):
    """One architecture as the levels check it."""

    name: str
    config: AnyModelConfig
    recompute: str = "none"
    documents: bool = False  # whether its batch is cut into documents
    on: Setting = ON_REFERENCE
    freeze: str = ""
    lora: Lora | None = None

    @property
    def on_reference(self) -> "ModelCase":
        """The same, with the reference ops."""
        return self._replace(on=ON_REFERENCE)


def shrunk(config: AnyModelConfig) -> AnyModelConfig:
    """The same architecture at fixture sizes: the same choices, the same depth, the same kind of head sharing."""
    if isinstance(config, SimpleLMConfig):
        return replace(config, vocab_size=V, hidden_dim=H * D, intermediate_dim=F)
    one_each = config.num_kv_heads == config.num_heads
    free_heads = config.head_dim != config.hidden_dim / config.num_heads
    return replace(
        config,
        vocab_size=V,
        hidden_dim=H * D - 2 if free_heads else H * D,
        num_heads=H,
        num_kv_heads=H if one_each else min(config.num_kv_heads, 2),
        head_dim=D,
        intermediate_dim=F,
        max_seq_len=T + 2,
    )


def _case(name: str, *, recompute: str = "none", documents: bool = False, **choices: Any) -> ModelCase:
    return ModelCase(name, shrunk(ModelConfig(num_layers=2, **choices)), recompute, documents)


_GPT2: dict[str, Any] = {
    "norm": "layer",
    "norm_bias": True,
    "position": "learned",
    "attn_bias": True,
    "ffn_bias": True,
    "ffn": "gelu",
}
_CLLM: dict[str, Any] = {
    "norm": "layer",
    "norm_bias": True,
    "norm_placement": "post",
    "position": "none",
    "ffn": "tanh",
    "ffn_bias": True,
}
_PENALTIES: dict[str, Any] = {"dropout": 0.2, "logit_softcap": 3.0, "z_loss": 0.01, "label_smoothing": 0.1}

# Together: every choice that a configuration has, at least once.
TRANSFORMER_CASES = [
    _case("llama", num_kv_heads=2, documents=True, recompute="cheap"),
    _case("gpt2", tie_embeddings=True, **_GPT2),
    _case("qk-norm", num_kv_heads=2, head_dim=16, qk_norm=True, ffn="relu", rope_theta=1e3),
    _case("cllm", tie_embeddings=True, **_CLLM),
    _case("penalties", norm="layer", ffn="geglu", ffn_bias=True, attn_bias=True, recompute="full", **_PENALTIES),
    _case(
        "mqa",
        num_kv_heads=1,
        norm_placement="post",
        position="none",
        ffn="relu2",
        qk_norm=True,
        attn_bias=True,
        recompute="cheap",
    ),
    _case(
        "post-dropout",
        norm_placement="post",
        position="learned",
        ffn="gelu",
        dropout=0.7,
        documents=True,
        recompute="full",
    ),
]
MODEL_CASES = [*TRANSFORMER_CASES, ModelCase("simplelm", shrunk(SimpleLMConfig()))]

# Models of which a part is trained: adapters of odd rank on some matrices of a shared matmul, and on all of them; patterns that
# freeze one end, a tied embedding, and parts of blocks in between.
PARTLY_TRAINED_CASES = [
    _case("lora", num_kv_heads=2, documents=True, recompute="cheap")._replace(lora=Lora(3, 5.0, "wq,wv,w_up,wo")),
    _case("lora-all", tie_embeddings=True, **_GPT2)._replace(lora=Lora(3, 2.0, "all-linear")),
    _case("lora-full", norm_placement="post", ffn="geglu", recompute="full", dropout=0.2)._replace(
        lora=Lora(2, 3.0, "wk,w_gate,w_down")
    ),
    _case("frozen", num_kv_heads=2, recompute="cheap")._replace(freeze="embed*,blocks.0.*,blocks.1.attn.w[qkv],*_norm.w"),
    _case("frozen-tied", tie_embeddings=True, **_GPT2)._replace(freeze="embed.w,blocks.1.*,final_norm.b"),
]


def batch(vocab_size: int = V, B: int = B, T: int = T, seed: int = 0) -> tuple[Tensor, Tensor]:  # tokens, targets (B, T)
    """Repeated tokens, nearly a third of the vocabulary unused, and unequal counts of valid targets: one ignored in the first
    sample, a padded tail in the second, nothing but padding in any further one."""
    generator = torch.Generator().manual_seed(param_seed(seed, "batch"))
    text = torch.randint(vocab_size - vocab_size // 3, (B, T + 1), generator=generator)
    text[:2, 0] = min(TINY_TOKEN, vocab_size - 1)
    text[0, 1:2], text[0, 2:3] = 0, vocab_size - 1  # both ends of the vocabulary, if T allows
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    targets[0, T // 2] = -100
    targets[1:2, T // 2 + 1 :] = -100
    targets[2:] = -100
    return tokens, targets


def data_of(case: ModelCase) -> Batch:
    """The batch a case is checked on, its samples cut into documents at 2, at 3, and nowhere."""
    cuts = torch.tensor([[2], [3], [T]])
    data = Batch(*batch(), (torch.arange(T) >= cuts).long() * 256 + 1 if case.documents else None)
    return data.to(case.on.device)


def build(case: ModelCase, dtype: str = "float64", recompute: str | None = None) -> AnyModel:
    """The model of a case, moved off its initial values: the same numbers in every dtype."""
    policy = recompute or case.recompute
    model = blank_model(case.config, dtype, case.on, recompute=policy, freeze=case.freeze, lora=case.lora)
    move_off_init(model, seed=1)
    return model


def blank_model(
    config: AnyModelConfig, dtype: str, on: Setting = ON_REFERENCE, *, seed: int = SEED, recompute: str = "none", **trains: Any
) -> AnyModel:
    """All parameters zero. A SimpleLM has nothing to choose but the device. trains: freeze and lora."""
    choices = {} if isinstance(config, SimpleLMConfig) else {"recompute": recompute, "ops": on.ops, **trains}
    return build_model(config, seed=seed, dtype=dtype, device=on.device, initialized=False, **choices)


def trains_of(model: AnyModel) -> dict[str, Any]:
    """The options that say which parameters of a model are trained, to build another like it."""
    return {"freeze": model.freeze, "lora": model.lora} if isinstance(model, Transformer) else {}


def move_off_init(model: AnyModel, seed: int) -> None:
    """Every parameter away from its initial value: norm weights not 1, biases not 0, matrices of a size that neither silences
    a sublayer nor saturates it, so that no tensor's gradient is negligible. All values are bfloat16 numbers,
    so that models of different dtypes hold the same ones."""
    for name, spec in model.store.layout.specs.items():
        generator = torch.Generator().manual_seed(param_seed(seed, name))
        noise = torch.randn(spec.shape, generator=generator)
        match spec.init:
            case "ones":
                w = 1 + 0.3 * (noise + 0.3 * noise.sign())  # none of them nearer to 1 than 0.09
            case "zeros":
                w = 0.3 * (noise + 0.3 * noise.sign())
            case "embedding":
                w = noise * min(0.5, 2.5 / math.sqrt(spec.shape[-1]))  # tied logits of one size at any width
            case _:
                w = 0.5 * noise / math.sqrt(spec.shape[-1])
        if name == "embed.w":
            w[TINY_TOKEN : TINY_TOKEN + 1] *= 0.3
        model.params[name].copy_(w.bfloat16())


def zero_by_identity(config: AnyModelConfig, seq_len: int) -> set[str]:
    """Parameters the loss does not depend on: a key bias shifts all scores of a query alike, unless positions or a norm
    tell the keys apart, and softmax ignores a shift; with one position there is nothing to attend to but itself."""
    if not isinstance(config, ModelConfig):
        return set()
    found = set()
    for sublayer in (s for block in build_blocks(config) for s in block.sublayers if s.kind == "attn"):
        kinds = {"wq", "wk", "bq", "bk", "q_norm.w", "k_norm.w"} if seq_len == 1 else set()
        if sublayer.config.position != "rope" and not sublayer.config.qk_norm:
            kinds.add("bk")
        found |= {f"{sublayer.name}.{kind}" for kind in kinds}
    return found


def loss_with_gradients(
    model: AnyModel,
    tokens: Tensor,  # (B, T) int64
    targets: Tensor,  # (B, T) int64
    documents: Tensor | None = None,  # (B, T) int64
    *,
    num_targets: int | None = None,
    first_sample: int = FIRST_SAMPLE,
    backward: bool = True,
) -> Tensor:  # ()
    """One forward as in training, dropout and all, and its backward, which adds to the gradients that are there."""
    if isinstance(model.config, SimpleLMConfig):
        options: dict[str, Any] = {}
    else:
        options = {"step": STEP, "first_sample": first_sample, "documents": documents}
    loss = model.forward(tokens, targets, num_targets=num_targets, **options)
    if backward:
        model.backward()
    return loss


def gradients(model: AnyModel, data: Batch) -> dict[str, Tensor]:
    """The model's own, by name; copies."""
    model.zero_grads()
    loss_with_gradients(model, *data)
    return {name: g.clone() for name, g in model.grads.items()}


def values(model: AnyModel) -> dict[str, Tensor]:
    """The parameters by name; copies, in float64, on the CPU."""
    return {name: w.to("cpu", torch.float64, copy=True) for name, w in model.params.items()}
