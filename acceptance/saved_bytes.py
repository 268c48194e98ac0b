"""What a forward keeps is known beforehand, and recomputing it changes no bit of the gradients.

Measured from outside: the storages of all tensors alive after the forward that were not alive before it."""

import gc
import warnings

import torch
from claim import Claims

from tapeless import ModelConfig, Transformer, load_preset, saved_bytes

SHAPES = {"llama-small": (4, 512), "cllm": (4, 32), "qwen3-small": (2, 256), "gpt2": (1, 256)}


def live_storages() -> dict[int, int]:  # address -> bytes
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects complain when looked at
        tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def measure(config: ModelConfig, B: int, T: int, policy: str, dtype: str) -> tuple[int, torch.Tensor]:
    model = Transformer(config, dtype=dtype, recompute=policy)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, config.vocab_size, (2, B, T), generator=generator)
    before = live_storages()
    loss = model.forward(tokens, targets)
    kept = sum(size for address, size in live_storages().items() if address not in before) - loss.nbytes
    model.backward()
    return kept, model.store.flat_grads.clone()


claims = Claims("saved_bytes")
rows = []
for name, (B, T) in SHAPES.items():
    config = load_preset(name)
    for dtype in ("float32", "bfloat16"):
        reference = None
        for policy in ("none", "cheap", "full"):
            predicted = sum(saved_bytes(config, B, T, policy, dtype).values())
            measured, grads = measure(config, B, T, policy, dtype)
            reference = grads if reference is None else reference
            equal = torch.equal(grads, reference)
            gap = abs(measured / predicted - 1)
            where = f"{name} {B}x{T} {dtype} {policy}"
            claims.check(f"{where}: saved bytes as predicted", bound="1 %", measured=f"{100 * gap:.4f} %", ok=gap <= 0.01)
            claims.check(
                f"{where}: gradients bit-equal to none", bound="equal", measured="equal" if equal else "different", ok=equal
            )
            rows.append(
                {
                    "model": name,
                    "tokens": f"{B}x{T}",
                    "dtype": dtype,
                    "policy": policy,
                    "predicted": predicted,
                    "measured": measured,
                }
            )
claims.finish(table=rows)
