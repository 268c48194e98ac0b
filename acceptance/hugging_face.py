"""Hugging Face out and in: random weights, odd configurations, every family; transformers is the judge.

python acceptance/hugging_face.py [CONFIGURATIONS]        of each family, drawn at random; 12 by default"""

import random
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from claim import Claims, skip
from training import scratch

import tapeless
from tapeless.config import ModelConfig
from tapeless.data.tokenizer import CharTokenizer
from tapeless.interop.families import FAMILIES, family_of
from tapeless.interop.family import Family
from tapeless.interop.generation import Generation
from tapeless.interop.hf_export import export_hugging_face
from tapeless.interop.hf_import import read_model

if find_spec("transformers") is None:
    skip("no package transformers here")
import transformers

LOGITS, GRADIENTS = 1e-4, 1e-5
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()


def drawn(family: str, draw: random.Random) -> ModelConfig:
    """A small model of the family, odd in whatever the family leaves open."""
    heads = draw.choice((1, 2, 3, 4, 6))
    shape: dict[str, Any] = {
        "vocab_size": draw.choice((23, 61, 130)),
        "hidden_dim": heads * draw.choice((2, 6, 10)),
        "num_layers": draw.choice((1, 2, 3)),
        "num_heads": heads,
        "intermediate_dim": draw.choice((5, 13, 32)),
        "max_seq_len": draw.choice((11, 17, 64)),
        "norm_eps": draw.choice((1e-6, 1e-5, 1e-3)),
        "tie_embeddings": draw.random() < 0.5,
    }
    if family == "GPT2LMHeadModel":
        biases = dict.fromkeys(("norm_bias", "attn_bias", "ffn_bias"), True)
        ffn = draw.choice(("gelu", "gelu", "tanh", "relu", "relu2"))
        return ModelConfig(**shape, **biases, norm="layer", position="learned", ffn=ffn)
    shape |= {
        "num_kv_heads": draw.choice([g for g in range(1, heads + 1) if heads % g == 0]),
        "head_dim": draw.choice((None, 2, 6, 16)),
        "rope_theta": draw.choice((1e2, 1e4, 5e5)),
        "attn_bias": draw.random() < 0.5,
        "ffn": draw.choice(("swiglu", "swiglu", "geglu")),
    }
    return ModelConfig(
        **shape, qk_norm=family.startswith("Qwen3"), ffn_bias=not family.startswith("Qwen3") and draw.random() < 0.5
    )


def with_weights(config: ModelConfig, seed: int) -> tapeless.Transformer:
    """Norms not 1 and biases not 0, so that nothing hides."""
    model = tapeless.Transformer(config, seed=seed, ops="reference")
    generator = torch.Generator().manual_seed(seed)
    for w in model.params.values():
        w.add_(torch.randn(w.shape, generator=generator) * 0.2)
    return model


def loaded(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def gradient_error(ours: tapeless.Transformer, theirs: Any, family: Family, tokens: torch.Tensor) -> float:
    """Of all gradients together, relative, in the L2 norm; theirs in float64, since in float32 they are the less exact ones."""
    theirs = theirs.double()
    inputs, targets = tokens[:, :-1], tokens[:, 1:].contiguous()
    ours.forward(inputs, targets)
    ours.backward()
    logits = theirs(inputs).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    grads = {name: w.grad for name, w in theirs.named_parameters()}
    truth = family.from_hf(ours.config, grads.__getitem__)
    off = sum((ours.grads[name] - dw).square().sum().item() for name, dw in truth.items())
    return (off / sum(dw.square().sum().item() for dw in truth.values())) ** 0.5


count = int(sys.argv[1]) if len(sys.argv) > 1 else 12
claims, table = Claims("hugging_face"), []
with scratch() as folder:
    for family in ("LlamaForCausalLM", "Qwen3ForCausalLM", "GPT2LMHeadModel"):
        draw, out_error, in_error, grad_error, equal = random.Random(family), 0.0, 0.0, 0.0, 0
        for n in range(count):
            config = drawn(family, draw)
            assert family_of(config).name == family
            ours, here = with_weights(config, n), folder / f"{family}-{n}"
            tokenizer = CharTokenizer(map(chr, range(0x100, 0x100 + config.vocab_size)))
            export_hugging_face(here, config, ours.params, tokenizer, Generation(), shard_bytes=draw.choice((3000, 10**9)))
            tokens = torch.randint(config.vocab_size, (2, 11), generator=torch.Generator().manual_seed(n))
            theirs = loaded(here)
            with torch.no_grad():
                out_error = max(out_error, (theirs(tokens).logits - ours.logits(tokens)).abs().max().item())
            back = read_model(here)
            equal += back.config == config and all(back.params[name].equal(w) for name, w in ours.params.items())
            with torch.no_grad():
                for w in theirs.parameters():  # weights that never were ours
                    w.add_(torch.randn(w.shape, generator=torch.Generator().manual_seed(n)) * 0.1)
            theirs.save_pretrained(here / "theirs", max_shard_size=draw.choice(("3KB", "1GB")))
            again = tapeless.load(here / "theirs")
            with torch.no_grad():
                in_error = max(in_error, (theirs(tokens).logits - again.logits(tokens)).abs().max().item())
            grad_error = max(grad_error, gradient_error(again, theirs, FAMILIES[family], tokens))
        table.append({"family": family, "export": out_error, "import": in_error, "gradients": grad_error, "equal": equal})
        for claim, bound, found in (
            ("exported, largest difference of a logit in transformers", LOGITS, out_error),
            ("saved by transformers, largest difference of a logit here", LOGITS, in_error),
            ("saved by transformers, gradients here, relative to theirs in float64", GRADIENTS, grad_error),
        ):
            claims.check(
                f"{family}, {count} unusual configurations: {claim}", bound=bound, measured=f"{found:.1e}", ok=found < bound
            )
        claims.check(
            f"{family}: export and import, bit for bit", bound=f"{count} equal", measured=f"{equal} equal", ok=equal == count
        )
claims.finish(table=table, transformers=transformers.__version__)
