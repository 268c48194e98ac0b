"""The size of a model's vocabulary where a recipe leaves it open but its data or tokenizer tell.

Tested by: tests/train/test_vocabulary.py."""

from dataclasses import replace
from pathlib import Path

from tapeless.config import AnyModelConfig, Recipe, TrainConfig
from tapeless.data.bpe import DEFAULT_SIZE
from tapeless.data.tokenizer import load_tokenizer, make_tokenizer


def infer_vocab_size(recipe: Recipe, config: AnyModelConfig, train: TrainConfig) -> tuple[AnyModelConfig, str]:
    """The model with that size, and where it is from; the model as it is, and nothing, if the recipe sets the size, the model
    is another's, or only reading the text would tell."""
    if "vocab_size" in recipe.model or train.init_from is not None:
        return config, ""
    prepared = None if train.dataset_path is None else Path(train.dataset_path)
    if prepared is not None and (prepared / "data.json").is_file():
        size, source = load_tokenizer(prepared / "tokenizer.json").vocab_size, f"that of the tokenizer of {prepared}"
    elif train.tokenizer == "bpe":
        size, source = DEFAULT_SIZE, "the default of a new BPE"
    elif train.tokenizer in ("bytes", "char", "char+chat"):  # the default is that of bytes
        return config, ""
    else:
        size, source = make_tokenizer(train.tokenizer, (), None).vocab_size, f"that of {train.tokenizer}"
    return replace(config, vocab_size=size), f"{size:,} ids, {source}; --vocab-size sets another"
