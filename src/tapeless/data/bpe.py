"""Byte-level BPE, trained and run by Hugging Face's `tokenizers`; and whatever else a tokenizer.json may describe.

Training uses GPT-2's split pattern, the one that llama.cpp also knows (tokenizer.ggml.pre = "gpt-2"), and adds the special
tokens of tokenizer.py. Ties between pairs are broken by their ids, so that the same text gives the same merges.

Tokenizers with GPT-2's split pattern encode word by word, with a cache of each word's ids. The package splits, looks up and
merges 4 MB per second on one core; Python's own regular expression and a dictionary are eight times as fast. A word alone is
not split further, so the package's ids for it are valid in any text. What counts as a letter or digit beyond ASCII depends on
the version of Unicode, and added tokens that are not special have rules of their own: lines and texts with any of those are
left to the package. Special ones are never found in a text.
A tokenizer.json of any other form runs in a process with limits (worker.py).
Tested by: tests/data/test_tokenizer.py, tests/data/test_word_cache.py, tests/data/test_guarded_tokenizer.py."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count, groupby
from typing import Any

import numpy as np

from tapeless.data.packages import require_package
from tapeless.data.tokenizer import SPECIAL, StreamDecoder, Tokenizer, byte_symbols, utf8
from tapeless.data.worker import BYTES_PER_SECOND, Limits, Worker
from tapeless.errors import DataError

BYTES, DEFAULT_SIZE = 256, 4096  # ids of a new BPE: the least, and if none are asked for
MAX_IDS = 1 << 22  # the table has an entry for each: a stray id of four billion must not allocate one
WORD = re.compile(r"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII)
LINE = re.compile(r"(?<=\S)(?=\n)")  # no word spans the end of a line after a visible character
MAX_STREAMS, STREAMS = 4096, count()
CACHED_WORDS, CACHED_LENGTH = 1 << 16, 64  # at most, in words and characters of one: about 9 MB with words of 12


def tokenizers_package() -> Any:
    return require_package("tokenizers", "this tokenizer")


class BpeTokenizer(Tokenizer):
    """Any tokenizer.json. If it is byte-level the bytes of each id are known, otherwise only decoded text is."""

    kind = "bpe"

    def __init__(self, spec: dict[str, Any], where: str = "tokenizer.json"):
        package = tokenizers_package()
        _check_merges(spec["model"], where)
        try:
            self.backend = package.Tokenizer.from_str(json.dumps(spec))
        except BaseException as error:  # the package raises nothing narrower, and a Rust panic is not even an Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise DataError(f"{where}: the package `tokenizers` cannot load it: {str(error)[:200]!r}") from None
        self.backend.no_truncation()  # a limit meant for one prompt would cut the training text off
        self.backend.no_padding()
        if getattr(self.backend.model, "dropout", None):
            self.backend.model.dropout = None  # merges left out at random: a text has one encoding
        self.backend.encode_special_tokens = True  # as text: no data may contain the end of a message
        vocab = self.backend.get_vocab(with_added_tokens=True)
        if not vocab:
            raise DataError(f"{where}: its vocabulary is empty")
        if max(vocab.values()) >= MAX_IDS:
            raise DataError(f"{where}: it has the id {max(vocab.values())}; a model has at most {MAX_IDS} ids")
        added = {token.content: (i, token.special) for i, token in self.backend.get_added_tokens_decoder().items()}
        byte_of = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
        table = [b""] * (max(vocab.values()) + 1)
        for token, i in vocab.items():
            plain = token in added or not byte_of.keys() >= set(token)
            table[i] = token.encode() if plain else bytes(byte_of[symbol] for symbol in token)
        super().__init__(table, spec, {name: i for name, (i, special) in added.items() if special})
        decoder = spec.get("decoder")
        self.byte_level = isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"
        self.word_cache = WordCache(self.backend) if uses_gpt2_split(spec) and is_context_free(spec) else None

    def encode(self, text: str) -> np.ndarray:  # (n,) int64
        utf8(text)
        return ids_of(self.backend.encode(text, add_special_tokens=False))

    def encode_prompt(self, text: str) -> np.ndarray:  # (n,) int64
        utf8(text)
        return ids_of(self.backend.encode(text))

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:  # (n,) int64 each
        for text in texts:
            utf8(text)
        if self.word_cache is not None:
            return self.word_cache.encode_all(texts)
        return list(map(ids_of, by_package(self.backend, texts)))

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        if self.byte_level:
            return super().decode_bytes(ids)
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=False).encode()

    def stream(self) -> StreamDecoder:
        return super().stream() if self.byte_level else BackendStream(self)


class GuardedTokenizer(Tokenizer):
    """A BpeTokenizer in a process of its own, with limits of time and memory."""

    kind, guarded = BpeTokenizer.kind, True

    def __init__(self, spec: dict[str, Any], where: str):
        tokenizers_package()  # whose absence is an error of this process
        self.worker = _shared_worker(json.dumps(spec), where)
        facts, *table = self.worker.ask(b"table")
        about = json.loads(facts)
        super().__init__(table, spec, about["special"])
        self.byte_level = about["byte_level"]

    def encode(self, text: str) -> np.ndarray:  # (n,) int64
        return self._ids(b"encode", [text])[0]

    def encode_prompt(self, text: str) -> np.ndarray:  # (n,) int64
        return self._ids(b"encode_prompt", [text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:  # (n,) int64 each
        return self._ids(b"encode", texts)

    def _ids(self, method: bytes, texts: Sequence[str]) -> list[np.ndarray]:  # (n,) int64 each
        parts = [utf8(text) for text in texts]
        found = self.worker.ask(method, *parts, seconds=sum(map(len, parts)) / BYTES_PER_SECOND)
        return [np.frombuffer(ids, np.int64) for ids in found]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        if self.byte_level:
            return super().decode_bytes(ids)
        packed = np.fromiter(map(int, ids), np.int64)
        return self.worker.ask(b"decode", packed.tobytes(), seconds=len(packed) / BYTES_PER_SECOND)[0]

    def stream(self) -> StreamDecoder:
        return super().stream() if self.byte_level else GuardedStream(self)


class GuardedStream(StreamDecoder):
    """A BackendStream in the tokenizer's process."""

    def __init__(self, tokenizer: GuardedTokenizer):
        super().__init__(tokenizer)
        self._worker, self._name = tokenizer.worker, str(next(STREAMS)).encode()

    def push(self, token: int) -> str:
        return self._worker.ask(b"step", self._name, str(int(token)).encode())[0].decode()


@lru_cache(maxsize=4)  # a command loads the tokenizer of a run more than once
def _shared_worker(spec: str, where: str) -> Worker:
    return Worker("tapeless.data.bpe:answers", spec.encode(), where.encode(), what=f"the tokenizer {where}", limits=Limits())


def answers(spec: bytes, where: bytes) -> Callable[..., Iterable[bytes]]:
    """The side of a GuardedTokenizer's process."""
    tokenizer = BpeTokenizer(json.loads(spec), where.decode())
    streams: dict[bytes, StreamDecoder] = {}

    def answer(method: bytes, *parts: bytes) -> Iterable[bytes]:
        if method == b"table":
            return [json.dumps({"special": tokenizer.special, "byte_level": tokenizer.byte_level}).encode(), *tokenizer.table]
        if method == b"decode":
            return [tokenizer.decode_bytes(np.frombuffer(parts[0], np.int64).tolist())]
        if method == b"step":
            name, token = parts
            if name not in streams and len(streams) >= MAX_STREAMS:
                del streams[next(iter(streams))]
            return [streams.setdefault(name, tokenizer.stream()).push(int(token)).encode()]
        texts = [part.decode() for part in parts]
        found = tokenizer.encode_all(texts) if method == b"encode" else map(tokenizer.encode_prompt, texts)
        return [ids.tobytes() for ids in found]

    return answer


def is_plain(spec: dict[str, Any]) -> bool:
    """Whether a tokenizer.json has only parts whose time and memory are in proportion to the text, whatever the file says, as
    those trained here and GPT-2's have. Patterns can backtrack, and replacements and decoders can multiply a text."""

    def has(name: str, *kinds: str) -> bool:
        part = spec.get(name)
        return part is None or (isinstance(part, dict) and part.get("type") in kinds)

    form = has("normalizer", "NFC", "NFD", "NFKC", "NFKD") and has("post_processor", "ByteLevel")
    whole = spec.get("pre_tokenizer") is not None and spec.get("decoder") is not None
    return whole and form and has("pre_tokenizer", "ByteLevel") and has("decoder", "ByteLevel") and has("model", "BPE")


def _check_merges(model: dict[str, Any], where: str) -> None:
    """Each merge must produce a token of the vocabulary; on some that do not, the package panics instead of raising."""
    merges, vocab, prefix = model.get("merges"), model.get("vocab"), model.get("continuing_subword_prefix") or ""
    if not isinstance(merges, list) or not isinstance(vocab, dict) or not isinstance(prefix, str):
        return  # not BPE, or the package rejects it
    for merge in merges:
        halves = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(halves, list) or len(halves) != 2 or not all(isinstance(half, str) for half in halves):
            continue  # the package reports it
        if not halves[1].startswith(prefix) or halves[0] + halves[1].removeprefix(prefix) not in vocab:
            raise DataError(f"{where}: the merge {merge!r:.80} produces no token of its vocabulary")


class BackendStream(StreamDecoder):
    """For tokenizers whose ids have no bytes of their own (a space may depend on neighbouring ids)."""

    def __init__(self, tokenizer: BpeTokenizer):
        super().__init__(tokenizer)
        self._backend = tokenizer.backend
        self._steps = tokenizers_package().decoders.DecodeStream(skip_special_tokens=False)

    def push(self, token: int) -> str:
        return self._steps.step(self._backend, int(token)) or ""


def uses_gpt2_split(spec: dict[str, Any]) -> bool:
    """Whether a tokenizer.json splits text into words as GPT-2 does."""
    before = spec.get("pre_tokenizer") or {}
    return before.get("type") == "ByteLevel" and before.get("use_regex", True) and not before.get("add_prefix_space")


def is_context_free(spec: dict[str, Any]) -> bool:
    """Whether the ids of a word depend on nothing but the word."""
    return not spec.get("normalizer")


def ids_of(encoding: Any) -> np.ndarray:  # (n,) int64
    return np.array(encoding.ids, np.int64)


def by_package(backend: Any, texts: Sequence[str]) -> list[Any]:  # tokenizers.Encoding
    return backend.encode_batch_fast(list(texts), add_special_tokens=False)  # without offsets


class WordCache(dict[str, bytes]):
    """From a word to its ids, as consecutive 32-bit integers."""

    def __init__(self, backend: Any):  # tokenizers.Tokenizer
        super().__init__()
        self.backend = backend
        self.added = [token.content for token in backend.get_added_tokens_decoder().values() if not token.special]
        self.starts = {token[:1] for token in self.added}

    def __missing__(self, word: str) -> bytes:
        found = ids_of(*by_package(self.backend, [word])).astype(np.uint32).tobytes()
        if len(word) <= CACHED_LENGTH:
            if len(self) >= CACHED_WORDS:
                self.clear()  # instead of keeping only the words that were read first
            self[word] = found
        return found

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:  # (n,) int64 each
        split = [list(self._blocks(text)) for text in texts]
        others = [block for blocks in split for by_word, block in blocks if not by_word]
        encodings = iter(by_package(self.backend, others))
        return [
            np.concatenate([self._ids(block) if by_word else ids_of(next(encodings)) for by_word, block in blocks])
            for blocks in split
        ]

    def _blocks(self, text: str) -> Iterator[tuple[bool, str]]:
        """The blocks of a text, and whether each is encoded word by word."""
        if any(start in text for start in self.starts) and any(token in text for token in self.added):
            yield False, text
        elif text.isascii():
            yield True, text
        else:
            for by_word, lines in groupby(LINE.split(text), str.isascii):
                yield by_word, "".join(lines)

    def _ids(self, block: str) -> np.ndarray:  # (n,) int64
        return np.frombuffer(b"".join(map(self.__getitem__, WORD.findall(block))), np.uint32).astype(np.int64)


def train_bpe(texts: Iterable[str], vocab_size: int | None) -> BpeTokenizer:
    smallest = BYTES + len(SPECIAL)
    if vocab_size is None:
        vocab_size = DEFAULT_SIZE
    if vocab_size < smallest:
        raise DataError(
            f"bpe has the 256 bytes, {len(SPECIAL)} special tokens, and merges up to vocab_size; "
            f"set it to at least {smallest}, got {vocab_size}"
        )
    package = tokenizers_package()
    backend = package.Tokenizer(package.models.BPE())
    backend.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)  # its pattern is GPT-2's
    backend.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL),
        initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens(list(SPECIAL))
    return BpeTokenizer(json.loads(backend.to_str()))
