"""Text to ids and back: bytes (the default), characters, byte-level BPE. All three are saved as a tokenizer.json that Hugging
Face's `tokenizers` loads and encodes alike with; bytes and characters need no package here, BPE (bpe.py) is that package.

    bytes   256 ids, the values of the UTF-8 bytes          char   the sorted characters of the data
Every id has bytes, and decoding concatenates them. Invalid UTF-8, which an untrained model generates, becomes U+FFFD. So does
an id beyond the tokenizer's vocabulary, which a model with a larger one may sample.

Special tokens are ids that no text has: the end of a text, and the start and end of a message. `bytes+chat` and `char+chat`
have them after their other ids, and so has every BPE trained here. A text that contains their names is encoded as the
characters of the names; only chat.py and prepare.py insert the tokens themselves. The names are those of ChatML: a role is
plain text between them, so there can be any, and llama.cpp and most other programs know them without being told.
Tested by: tests/data/test_tokenizer.py, against `tokenizers`."""

import codecs
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tapeless.config import TOKENIZERS
from tapeless.data.files import canonical_json, is_pickle, write_json
from tapeless.errors import PICKLE, UNREADABLE, DataError
from tapeless.regular import read_json

REPLACEMENT = "\ufffd".encode()
SPECIAL = END_OF_TEXT, MESSAGE_START, MESSAGE_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>")  # also those of GPT-2, Llama 3, Llama 2
CHAT = "+chat"


class Tokenizer(ABC):
    """What all kinds share: a table of the bytes of each id, and the tokenizer.json that describes it."""

    kind: str
    guarded = False  # whether it runs in a process of its own, with limits (worker.py)

    def __init__(self, table: list[bytes], spec: dict[str, Any], special: dict[str, int]):
        self.table = table
        self.spec = spec  # the content of tokenizer.json
        self.special = special  # the ids of special tokens by name
        self.vocab_size = len(table)
        self.fingerprint = hashlib.sha256(canonical_json(spec)).hexdigest()

    @property
    def end_of_text(self) -> int | None:
        """The id that ends a document."""
        return next((self.special[name] for name in ENDS_OF_TEXT if name in self.special), None)

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:  # (n,) int64
        """As part of a text, without tokens that begin one, and without special tokens, whatever the text contains."""

    def encode_prompt(self, text: str) -> np.ndarray:  # (n,) int64
        """As the beginning of a text: with the tokenizer's own first token, if it has one."""
        return self.encode(text)

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:  # (n,) int64 each
        return [self.encode(text) for text in texts]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(self.table[i] if 0 <= i < self.vocab_size else REPLACEMENT for i in map(int, ids))

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode(errors="replace")

    def stream(self) -> "StreamDecoder":
        return StreamDecoder(self)

    def save(self, path: Path) -> None:
        write_json(path, self.spec)


class StreamDecoder:
    """Text as ids arrive: a character is returned with the id that completes it, never in halves."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(self._tokenizer.decode_bytes([token]))

    def finish(self) -> str:
        """The rest: the replacement of a character that was never completed, or nothing."""
        return self._utf8.decode(b"", final=True)


def utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        character = text[error.start]
        raise DataError(
            f"character {character!r} at position {error.start} is half of a surrogate pair; expected text"
        ) from None


def byte_symbols() -> list[str]:
    """A visible character for each byte, as GPT-2 chose them: itself where it is printable Latin-1, else one from 256 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in visible]
    return [chr(byte if byte in visible else 256 + others.index(byte)) for byte in range(256)]


class SimpleTokenizer(Tokenizer):
    """A tokenizer that needs no package: one id for each piece of text, and the special tokens after them."""

    def __init__(
        self,
        kind: str,
        pieces: list[bytes],
        pre_tokenizer: dict[str, Any],
        model: dict[str, Any],
        decoder: dict[str, Any],
        *,
        chat: bool,
    ):
        self.kind = kind + CHAT * chat
        special = {name: len(pieces) + i for i, name in enumerate(SPECIAL)} if chat else {}
        flags = {**dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False), "special": True}
        added = [{"id": i, "content": name, **flags} for name, i in special.items()]
        nothing = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
        parts = {"added_tokens": added, "pre_tokenizer": pre_tokenizer, "decoder": decoder, "model": model}
        super().__init__([*pieces, *map(str.encode, special)], {"version": "1.0", **nothing, **parts}, special)


class ByteTokenizer(SimpleTokenizer):
    def __init__(self, *, chat: bool = False) -> None:
        """For `tokenizers` this is a byte-level BPE without merges."""
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        model = {"type": "BPE", "vocab": {symbol: byte for byte, symbol in enumerate(byte_symbols())}, "merges": []}
        super().__init__("bytes", [bytes([byte]) for byte in range(256)], byte_level, model, byte_level, chat=chat)

    def encode(self, text: str) -> np.ndarray:  # (n,) int64
        return np.frombuffer(utf8(text), np.uint8).astype(np.int64)


class CharTokenizer(SimpleTokenizer):
    def __init__(self, characters: Iterable[str], *, chat: bool = False):
        """For `tokenizers` this is a word-level model in which every character is a word."""
        self.characters = sorted(set(characters))
        self.known = frozenset(self.characters)
        self._codes = np.array([ord(character) for character in self.characters])  # (V,) ascending
        split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
        vocab = {character: i for i, character in enumerate(self.characters)}
        model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}  # not in the vocabulary, so unknown is an error
        pieces = [utf8(character) for character in self.characters]
        super().__init__("char", pieces, split, model, {"type": "Fuse"}, chat=chat)

    def encode(self, text: str) -> np.ndarray:  # (n,) int64
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        ids = np.searchsorted(self._codes, codes)
        unknown = np.flatnonzero(self._codes[np.minimum(ids, len(self._codes) - 1)] != codes)
        if len(unknown):
            at = int(unknown[0])
            raise DataError(
                f"character {text[at]!r} at position {at} is not among the {len(self._codes)} characters of the training data; "
                "leave it out, or train with the bytes tokenizer, which knows every text"
            )
        return ids


def make_tokenizer(kind: str, texts: Iterable[str], vocab_size: int | None) -> Tokenizer:
    """The tokenizer of a configuration: bytes, char or bpe (both trained on `texts`), or the path of a tokenizer.json."""
    chat = kind.endswith(CHAT)
    if kind.removesuffix(CHAT) == "bytes":
        return ByteTokenizer(chat=chat)
    if kind.removesuffix(CHAT) == "char":
        characters: set[str] = set()
        for text in texts:
            characters |= set(text)
        return CharTokenizer(characters, chat=chat)
    if kind == "bpe":
        from tapeless.data.bpe import train_bpe

        return train_bpe(texts, vocab_size)
    return load_tokenizer(Path(kind))


def load_tokenizer(path: Path, *, guarded: bool = False) -> Tokenizer:
    """guarded: this process has limits already."""
    try:
        spec = read_json(path)
    except FileNotFoundError:
        raise DataError(
            f"{path}: no such tokenizer; expected {', '.join(TOKENIZERS)}, or the path of a tokenizer.json"
        ) from None
    except OSError as error:
        raise UNREADABLE(path=path, reason=error.strerror) from None
    except ValueError as error:
        if isinstance(error, UnicodeDecodeError) and is_pickle(error.object):
            raise PICKLE(path=path, expected="a tokenizer.json") from None
        raise DataError(f"{path}: not a tokenizer.json: {error}") from None
    return tokenizer_of(spec, str(path), guarded=guarded)


def tokenizer_of(spec: Any, where: str, *, guarded: bool = False) -> Tokenizer:
    """From the content of a tokenizer.json."""
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        raise DataError(f"{where}: not a tokenizer.json: it has no `model`")
    vocab, chat = spec["model"].get("vocab"), bool(spec.get("added_tokens"))
    by_byte = ByteTokenizer(chat=chat)
    if spec == by_byte.spec:
        return by_byte
    if isinstance(vocab, dict) and vocab and all(len(word) == 1 for word in vocab):
        by_character = CharTokenizer(vocab, chat=chat)
        if spec == by_character.spec:
            return by_character
    from tapeless.data.bpe import BpeTokenizer, GuardedTokenizer, is_plain

    return BpeTokenizer(spec, where) if guarded or is_plain(spec) else GuardedTokenizer(spec, where)
