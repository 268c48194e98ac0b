"""Tokenizers: round trips, and the same ids as Hugging Face's `tokenizers` from the same tokenizer.json."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from tapeless.config import TOKENIZERS
from tapeless.data import tokenizer as tokenizer_module
from tapeless.data.bpe import BpeTokenizer, train_bpe
from tapeless.data.tokenizer import SPECIAL, ByteTokenizer, CharTokenizer, Tokenizer, load_tokenizer, make_tokenizer
from tapeless.errors import DataError, MissingError

# Every ASCII byte, and text whose UTF-8 has every lead and continuation byte that occurs: two, three and four bytes long.
ASCII = "".join(map(chr, range(128)))
WIDE = "".join(chr(c) for c in [*range(0x80, 0x800, 7), *range(0x800, 0xD800, 61), *range(0xE000, 0x10000, 61)])
ASTRAL = "".join(chr(c) for c in range(0x10000, 0x110000, 4099))
TEXT = f"{ASCII}The quick brown fox's 42 jumps,\n\n  it'll\tgo \r\n  on\u00a0and on…  {WIDE}{ASTRAL}e\u0301🙂👩‍👩‍👧\n"
PROSE = "the cat sat on the mat, and the rat that sat with the cat was fat.\n" * 50 + TEXT


def made(kind: str) -> Tokenizer:
    return make_tokenizer(kind, [PROSE], 400)


KINDS = {kind: made(kind) for kind in TOKENIZERS}
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_round_trip(kind: str):
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(TEXT)
    assert ids.dtype == np.int64
    assert ids.min() >= 0
    assert ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode_bytes(ids) == TEXT.encode()
    assert tokenizer.encode("").tolist() == []
    assert tokenizer.decode([]) == ""


@every_kind
def test_hugging_face_agrees(kind: str, tmp_path: Path):
    tokenizer = KINDS[kind]
    tokenizer.save(tmp_path / "tokenizer.json")
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs.get_vocab_size() == tokenizer.vocab_size
    for text in (TEXT, " leading", "trailing ", "\n\n\n", "a"):
        assert theirs.encode(text).ids == tokenizer.encode(text).tolist()
        assert theirs.decode(tokenizer.encode(text).tolist()) == text


@every_kind
def test_saved_and_loaded(kind: str, tmp_path: Path):
    tokenizer = KINDS[kind]
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert (loaded.kind, loaded.vocab_size, loaded.fingerprint) == (kind, tokenizer.vocab_size, tokenizer.fingerprint)
    np.testing.assert_array_equal(loaded.encode(TEXT), tokenizer.encode(TEXT))
    again = make_tokenizer(str(tmp_path / "tokenizer.json"), "", None)
    assert again.fingerprint == tokenizer.fingerprint


def test_what_the_ids_are():
    assert KINDS["bytes"].encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert KINDS["bytes"].vocab_size == 256
    characters = CharTokenizer("hello world")
    assert characters.characters == list(" dehlorw")
    assert characters.encode("held").tolist() == [3, 2, 4, 1]
    assert KINDS["bpe"].vocab_size == 400
    assert len(KINDS["bpe"].encode("the cat sat on the mat")) < 12


def test_fingerprints_tell_tokenizers_apart():
    prints = {tokenizer.fingerprint for tokenizer in KINDS.values()}
    prints |= {CharTokenizer("ab").fingerprint, CharTokenizer("abc").fingerprint, train_bpe([PROSE], 300).fingerprint}
    assert len(prints) == 8
    assert all(len(fingerprint) == 64 for fingerprint in prints)
    assert ByteTokenizer().fingerprint == KINDS["bytes"].fingerprint


@every_kind
def test_the_stream_gives_whole_characters(kind: str):
    tokenizer = KINDS[kind]
    stream = tokenizer.stream()
    text = f"a{WIDE[5]}{WIDE[-3]}🙂 the cat"  # characters of one to four bytes
    out = [stream.push(token) for token in tokenizer.encode(text).tolist()]
    assert "".join(out) + stream.finish() == text
    assert not any("\ufffd" in piece for piece in out)


def test_broken_characters_are_replaced():
    tokenizer = KINDS["bytes"]
    stream = tokenizer.stream()
    assert [stream.push(token) for token in (97, 0xC3, 98, 0xE6)] == ["a", "", "\ufffdb", ""]
    assert stream.finish() == "\ufffd"
    assert tokenizer.decode([97, 0xC3, 98, 0xE6]) == "a\ufffdb\ufffd"


@every_kind
def test_an_id_beyond_the_vocabulary_shows_as_replacement(kind: str):
    """A model may have more ids than its tokenizer."""
    tokenizer = KINDS[kind]
    assert tokenizer.decode([*tokenizer.encode("a"), 5000, *tokenizer.encode("b")]) == "a\ufffdb"


def test_an_unknown_character_is_named():
    with pytest.raises(DataError, match="character 'x' at position 4 is not among the 8 characters"):
        CharTokenizer("hello world").encode("hellx")
    with pytest.raises(DataError, match=r"character '\\U0010ffff' at position 0"):
        CharTokenizer("hello world").encode("\U0010ffff")


@every_kind
def test_half_a_surrogate_pair_is_named(kind: str):
    with pytest.raises(DataError, match=r"character '\\ud83d' at position 2 "):
        KINDS[kind].encode("ab\ud83dc")


def test_bpe_training_is_deterministic():
    """Also in another process, whose hashes are salted differently and which has another number of threads."""
    code = (
        "import sys; from tapeless.data.bpe import train_bpe; "
        "print(train_bpe([sys.stdin.buffer.read().decode()], 400).fingerprint)"
    )
    for threads in ("1", "3"):
        run = subprocess.run(
            [sys.executable, "-c", code],
            input=PROSE.encode(),
            capture_output=True,
            check=True,
            env={"PYTHONPATH": str(Path(tokenizer_module.__file__).parents[2]), "RAYON_NUM_THREADS": threads},
        )
        assert run.stdout.decode().strip() == KINDS["bpe"].fingerprint


@pytest.mark.parametrize("vocab_size", [256, 258])
def test_bpe_needs_room_for_the_bytes(vocab_size: int):
    with pytest.raises(DataError, match=f"256 bytes, .* got {vocab_size}"):
        make_tokenizer("bpe", [PROSE], vocab_size)


def test_a_foreign_tokenizer(tmp_path: Path):
    """Not byte-level, with special tokens and a limit on its length, as a published one may have."""
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    theirs.decoder = tokenizers.decoders.Metaspace()
    theirs.train_from_iterator(
        [PROSE], tokenizers.trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", "<s>"], show_progress=False)
    )
    theirs.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    theirs.enable_truncation(3)
    theirs.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    ids = tokenizer.encode("the cat sat on the mat")
    assert len(ids) > 3
    assert 1 not in ids
    assert tokenizer.decode(ids) == "the cat sat on the mat"
    stream = tokenizer.stream()
    assert "".join(stream.push(token) for token in ids.tolist()) + stream.finish() == "the cat sat on the mat"


def test_special_tokens_have_their_bytes():
    spec = json.loads(json.dumps(KINDS["bpe"].spec))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spec["added_tokens"] += [{"id": 400, "content": "<|é end|>", "special": True, **flags}]
    tokenizer = BpeTokenizer(spec)
    assert tokenizer.vocab_size == 401
    assert tokenizer.decode([*tokenizer.encode("the cat"), 400, *tokenizer.encode("the")]) == "the cat<|é end|>the"


@every_kind
def test_special_tokens(kind: str):
    """They come after all others, and no text has them."""
    tokenizer, V = KINDS[kind], KINDS[kind].vocab_size
    if kind in ("bytes", "char"):
        assert (tokenizer.special, tokenizer.end_of_text) == ({}, None)
        return
    assert tokenizer.special == dict(zip(SPECIAL, range(V - 3, V), strict=True))
    assert tokenizer.end_of_text == V - 3
    text = "the cat <|endoftext|><|im_start|>sat<|im_end|>\n" if kind != "char+chat" else "<|im_end|>"
    for ids in (tokenizer.encode(text), tokenizer.encode_prompt(text), *tokenizer.encode_all([text, text])):
        assert ids.max() < V - 3
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", ["</s>", "<|end_of_text|>"])
def test_the_end_of_text_of_other_tokenizers(name: str):
    spec = json.loads(json.dumps(KINDS["bytes+chat"].spec).replace("<|endoftext|>", name))
    assert BpeTokenizer(spec).end_of_text == 256


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such tokenizer; expected bytes, char, bpe"),
        ("", "not a tokenizer.json"),
        ("[1]", "it has no `model`"),
        ('{"model": 3}', "it has no `model`"),
        ('{"model": {"type": "Unheard"}}', "the package `tokenizers` cannot load it"),
        ('{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "its vocabulary is empty"),
    ],
)
def test_bad_tokenizer_files(tmp_path: Path, content: str | None, message: str):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError) as caught:
        load_tokenizer(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Bytes and characters need none; the others say what to install."""
    for kind, tokenizer in KINDS.items():
        tokenizer.save(tmp_path / f"{kind}.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert load_tokenizer(tmp_path / "bytes.json").kind == "bytes"
    assert load_tokenizer(tmp_path / "char.json").kind == "char"
    for load in (lambda: load_tokenizer(tmp_path / "bpe.json"), lambda: train_bpe([PROSE], 300)):
        with pytest.raises(MissingError, match=r"pip install 'tapeless\[bpe\]'"):
            load()
