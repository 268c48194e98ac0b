"""The kv_cache: keys and values of the tokens already seen, so that decoding runs each token through the model once.

The forward is the one that trains; a layer only puts its new keys and values behind the old ones and attends to all.
Tested by: tests/model/test_decode.py."""

import torch
from torch import Tensor

from tapeless.config import ModelConfig
from tapeless.errors import InputError


class KVCache:
    def __init__(self, config: ModelConfig, batch_size: int, capacity: int, device: torch.device, dtype: torch.dtype):
        if config.position == "learned" and capacity > config.max_seq_len:
            raise InputError(
                f"kv_cache for {capacity} tokens, but max_seq_len is {config.max_seq_len}; learned positions end there"
            )
        shape = (config.num_layers, batch_size, config.num_kv_heads, capacity, config.head_dim)
        self.keys = torch.empty(shape, device=device, dtype=dtype)  # (L, B, G, capacity, D)
        self.values = torch.empty_like(self.keys)
        self.length = 0  # tokens held

    def expect(self, batch_size: int, new: int) -> None:
        """Room for `new` tokens of this batch, or an error that says what is wrong."""
        B, capacity = self.keys.shape[1], self.keys.shape[3]
        if batch_size != B:
            raise InputError(f"kv_cache was made for batches of {B}, got {batch_size}")
        if self.length + new > capacity:
            raise InputError(f"kv_cache holds {self.length} of {capacity} tokens, no room for {new} more")

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:  # (B, G, T, D) -> (B, G, length+T, D)
        end = self.length + k.shape[2]
        self.keys[layer, :, :, self.length : end] = k
        self.values[layer, :, :, self.length : end] = v
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]  # mutant: kv-cache
