"""What a run can be exported to agrees with the exports."""

import pytest

from tapeless.config import ModelConfig, SimpleLMConfig, load_preset
from tapeless.data.tokenizer import ByteTokenizer, CharTokenizer
from tapeless.interop.targets import export_targets


@pytest.mark.parametrize(
    ("config", "tokenizer", "says"),
    [
        (ModelConfig(), ByteTokenizer(), "hf (LlamaForCausalLM), gguf"),
        (ModelConfig(), CharTokenizer("ab"), "hf (LlamaForCausalLM), not gguf: a GGUF export supports byte-level BPE"),
        (
            load_preset("tiny"),
            ByteTokenizer(),
            "neither to hf nor to gguf: no Hugging Face family has this architecture; the nearest",
        ),
        (ModelConfig(ffn="geglu"), ByteTokenizer(), "hf (LlamaForCausalLM), not gguf: llama.cpp's architecture llama: ffn"),
        (SimpleLMConfig(), ByteTokenizer(), "neither to hf nor to gguf: a SimpleLM has no attention"),
    ],
    ids=["default", "characters", "tiny", "geglu", "simplelm"],
)
def test_targets(config, tokenizer, says: str):
    assert export_targets(config, tokenizer).startswith(says)
