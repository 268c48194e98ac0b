"""Byte-level BPE, trained and run by Hugging Face's `tokenizers`; and whatever else a tokenizer.json may describe.

Training uses GPT-2's split pattern, the one that llama.cpp also knows (tokenizer.ggml.pre = "gpt-2"), and no special
tokens. Ties between pairs are broken by their ids, so that the same text gives the same merges.
Tested by: tests/data/test_tokenizer.py."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tapeless.data.packages import package
from tapeless.data.tokenizer import StreamDecoder, Tokenizer, byte_symbols, utf8
from tapeless.data.words import Words, by_package, cuts_as_gpt2, ids_of, repeats_itself
from tapeless.errors import DataError

MOST_IDS = 1 << 22  # a table has a place for each: a stray id of four billion must not make one


def tokenizers_package() -> Any:
    return package("tokenizers", "this tokenizer")


class BpeTokenizer(Tokenizer):
    """A tokenizer.json of any make. Where it is byte-level the bytes of each id are known, else only decoded text is."""

    kind = "bpe"

    def __init__(self, spec: dict[str, Any], where: str = "tokenizer.json"):
        package = tokenizers_package()
        _check_merges(spec["model"], where)
        try:
            self.backend = package.Tokenizer.from_str(json.dumps(spec))
        except BaseException as error:  # the package raises nothing narrower, and where its Rust panics not even an Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise DataError(f"{where}: the package `tokenizers` cannot load it: {str(error)[:200]!r}") from None
        self.backend.no_truncation()  # a limit meant for one prompt would cut the training text off
        self.backend.no_padding()
        vocab = self.backend.get_vocab(with_added_tokens=True)
        if not vocab:
            raise DataError(f"{where}: its vocabulary is empty")
        if max(vocab.values()) >= MOST_IDS:
            raise DataError(f"{where}: it has the id {max(vocab.values())}; a model has at most {MOST_IDS} ids")
        added = {token.content for token in self.backend.get_added_tokens_decoder().values()}
        byte_of = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
        table = [b""] * (max(vocab.values()) + 1)
        for token, i in vocab.items():
            plain = token in added or not byte_of.keys() >= set(token)
            table[i] = token.encode() if plain else bytes(byte_of[symbol] for symbol in token)
        super().__init__(table, spec)
        decoder = spec.get("decoder")
        self.byte_level = isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"
        self.words = Words(self.backend) if cuts_as_gpt2(spec) and repeats_itself(spec) else None

    def encode(self, text: str) -> np.ndarray:  # (n,) int64
        utf8(text)
        return ids_of(self.backend.encode(text, add_special_tokens=False))

    def encode_prompt(self, text: str) -> np.ndarray:  # (n,) int64
        utf8(text)
        return ids_of(self.backend.encode(text))

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:  # (n,) int64 each
        for text in texts:
            utf8(text)
        if self.words is not None:
            return self.words.encode_all(texts)
        return list(map(ids_of, by_package(self.backend, texts)))

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        if self.byte_level:
            return super().decode_bytes(ids)
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=False).encode()

    def stream(self) -> StreamDecoder:
        return super().stream() if self.byte_level else BackendStream(self)


def _check_merges(model: dict[str, Any], where: str) -> None:
    """Each merge makes a token of the vocabulary; on some that do not, the package panics instead of raising."""
    merges, vocab, prefix = model.get("merges"), model.get("vocab"), model.get("continuing_subword_prefix") or ""
    if not isinstance(merges, list) or not isinstance(vocab, dict) or not isinstance(prefix, str):
        return  # not BPE, or nothing that the package would take for it
    for merge in merges:
        halves = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(halves, list) or len(halves) != 2 or not all(isinstance(half, str) for half in halves):
            continue  # which the package says itself
        if not halves[1].startswith(prefix) or halves[0] + halves[1].removeprefix(prefix) not in vocab:
            raise DataError(f"{where}: the merge {merge!r:.80} makes no token of its vocabulary")


class BackendStream(StreamDecoder):
    """For tokenizers whose ids have no bytes of their own (a space may depend on the neighbours)."""

    def __init__(self, tokenizer: BpeTokenizer):
        super().__init__(tokenizer)
        self._backend = tokenizer.backend
        self._steps = tokenizers_package().decoders.DecodeStream(skip_special_tokens=False)

    def push(self, token: int) -> str:
        return self._steps.step(self._backend, int(token)) or ""


def train_bpe(texts: Iterable[str], vocab_size: int | None) -> BpeTokenizer:
    if vocab_size is None or vocab_size < 256:
        raise DataError(f"bpe begins with the 256 bytes and adds merges up to vocab_size; set it above 256, got {vocab_size}")
    package = tokenizers_package()
    backend = package.Tokenizer(package.models.BPE())
    backend.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)  # its pattern is GPT-2's
    backend.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return BpeTokenizer(json.loads(backend.to_str()))
