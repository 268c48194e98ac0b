"""The flat buffers as the ops take them: views by place in the model, of parameters or of gradients.

Tested by: tests/model/test_params.py."""

from typing import NamedTuple

from torch import Tensor

from tapeless.config import ModelConfig
from tapeless.model.params import FlatLayout, transformer_specs
from tapeless.model.product import Adapter, Product
from tapeless.model.sublayers import BlockParams, Params


class TransformerParams(NamedTuple):
    """The parameters, or the gradients, None of what is frozen."""

    embed: Tensor | None  # (V, C)
    positions: Tensor | None  # (Tmax, C)
    blocks: list[BlockParams]
    final_norm: Params
    head: Tensor | None  # (V, C); a tied model's is the embedding, whose gradient then collects from both ends


def product_names(layout: FlatLayout, config: ModelConfig) -> set[str]:
    """The parameters whose gradient begins as one product of the set: every matrix but an embedding that no head shares, and
    the second half of an adapter."""
    matrices = {name for name, spec in layout.specs.items() if spec.init in ("linear", "residual", "adapter")}
    return matrices | ({"embed.w"} & layout.specs.keys()) if config.tie_embeddings else matrices


def structured(config: ModelConfig, layout: FlatLayout, flat: Tensor) -> TransformerParams:
    """The flat buffer, seen through the views that the ops take; None in the place of what the layout does not have."""
    views = layout.views(flat)
    heights = {spec.name: spec.shape[0] for spec in transformer_specs(config)}

    def norm(name: str) -> Params:
        w, b = views.get(f"{name}.w"), views.get(f"{name}.b")
        return (w,) if config.norm == "rms" else (w, b)

    def product(weights: list[str], biases: list[str]) -> Product:
        adapters, first = [], 0
        for name in weights:
            if f"{name}.lora_a" in views:
                adapters.append(Adapter(views[f"{name}.lora_a"], views[f"{name}.lora_b"], first))
            first += heights.get(name, 0)
        return Product(layout.joined(flat, *weights), layout.joined(flat, *biases), tuple(adapters))

    def block(i: int) -> BlockParams:
        attn, ffn = f"blocks.{i}.attn", f"blocks.{i}.ffn"
        return BlockParams(
            attn_norm=norm(f"{attn}_norm"),
            qkv=product([f"{attn}.w{x}" for x in "qkv"], [f"{attn}.b{x}" for x in "qkv"]),
            qk_norm=(views.get(f"{attn}.q_norm.w"), views.get(f"{attn}.k_norm.w")),
            wo=product([f"{attn}.wo"], [f"{attn}.bo"]),
            ffn_norm=norm(f"{ffn}_norm"),
            up=product([f"{ffn}.w_gate", f"{ffn}.w_up"], [f"{ffn}.b_gate", f"{ffn}.b_up"]),
            down=product([f"{ffn}.w_down"], [f"{ffn}.b_down"]),
        )

    return TransformerParams(
        embed=views.get("embed.w"),
        positions=views.get("pos.w"),
        blocks=[block(i) for i in range(config.num_layers)],
        final_norm=norm("final_norm"),
        head=views.get("embed.w" if config.tie_embeddings else "head.w"),
    )
