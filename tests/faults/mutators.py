"""Files made wrong on purpose. A mutation changes a file as damage would (bits, lengths), as a careless writer would (values,
keys) or as an attacker would (offsets, sizes, paths, links, pipes). It knows the structure of JSON, JSONL, TOML, tensor files,
arrays and templates, and changes one value in them. The same seed makes the same directory.
Used by: fuzz.py; by tests/faults/test_hostile.py for directories of Hugging Face alone."""

import ast
import copy
import json
import os
import random
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tapeless.config import ModelConfig
from tapeless.data.tokenizer import CharTokenizer, Tokenizer
from tapeless.errors import TapelessError
from tapeless.interop.generation import Generation
from tapeless.interop.hf_export import export_hugging_face
from tapeless.interop.hf_import import read_model
from tapeless.model.transformer import Transformer

SIZES: dict[str, Any] = {"vocab_size": 300, "hidden_dim": 8, "num_layers": 2, "num_heads": 2, "intermediate_dim": 6}
GPT2: dict[str, Any] = {"norm": "layer", "norm_bias": True, "position": "learned", "ffn": "gelu", "max_seq_len": 16}
MODELS = [
    ModelConfig(**SIZES, num_kv_heads=1),
    ModelConfig(**SIZES, qk_norm=True, head_dim=6, tie_embeddings=True),
    ModelConfig(**SIZES, **GPT2, attn_bias=True, ffn_bias=True, tie_embeddings=True),
]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 7, 255, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64, 10**40, 0.5, -0.0, 1e308, 1e-320),
    *(float("nan"), float("inf"), "", "x", "F32", "BF16", "I64", "silu", "../../etc/passwd", "/etc/passwd", "a\0b", "\ud800"),
    *("C:\\x", "config.json", "model.safetensors", [], {}, [0], [-1, 3], [2**62] * 4, [[[]]], {"a": {"b": []}}, [0, 2**63 - 1]),
    *(["LlamaForCausalLM"], ["GPT2LMHeadModel"], ["Qwen3ForCausalLM"], {"rope_type": "yarn"}, "\x1b[2J\n", "a" * 5000),
    *(
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ 'a' * 10**9 }}",
        "{{ messages.__class__ }}",
        "{% if %}",
        "{{ messages }}",
    ),
    *(
        "((a+)+)+$",
        "[^\\\\s]",
        "",
        "\\u00e9",
        "Ġ" * 50,
        {"Regex": "(a|a)*b"},
        {"type": "Replace", "pattern": {"String": ""}, "content": "xx"},
    ),
]
HUGE_NUMBER = b"9" * 5000  # more digits than Python converts


def base_directories(folder: Path, tokenizer: Tokenizer | None = None) -> list[Path]:
    """One healthy directory per family, the first also in shards."""
    found = []
    for i, (config, shard_bytes) in enumerate([(MODELS[0], 4000), *((config, 10**9) for config in MODELS)]):
        model = Transformer(config, seed=i, ops="reference")
        chars = tokenizer or CharTokenizer(map(chr, range(ord("a"), ord("z"))))
        export_hugging_face(folder / f"base-{i}", config, model.params, chars, Generation((1,)), shard_bytes=shard_bytes)
        found.append(folder / f"base-{i}")
    return found


def judged(folder: Path) -> str:
    """`read`, or the code of the error; anything else that is raised is a defect of the reader."""
    try:
        model = read_model(folder)
    except TapelessError as error:
        text = f"{error}"
        assert "\n" not in text, f"an error of more than one line: {text!r}"
        return error.code
    assert all(torch.isfinite(w).all() for w in model.params.values())
    return "read"


def mutants(bases: list[Path], scratch: Path, seeds: range) -> Iterator[tuple[int, str, Path]]:
    """Seed, what was done, and the directory, which lives until the next is asked for."""
    for seed in seeds:
        draw = random.Random(seed)
        folder = scratch / "mutant"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(draw.choice(bases), folder)
        done = [mutate(folder, draw) for _ in range(draw.choice((1, 1, 1, 2, 3)))]
        yield seed, "; ".join(done), folder


def mutate(folder: Path, draw: random.Random, *, special: bool = True) -> str:
    """special: also links, pipes and folders, which only a reader of untrusted directories has to tell from files: a pipe given
    as a text waits for its writer, as with every program."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    if not files:  # an earlier mutation made a pipe or a link of the only one
        return "nothing"
    path = draw.choice([*files, *(file for file in files if file.suffix == ".safetensors")])  # weights twice as often
    raw = [change for change in RAW if special or change not in (link, pipe)]
    change = draw.choice(STRUCTURED if draw.random() < 0.7 else raw)
    change(path, draw)
    return f"{change.__name__} {path.relative_to(folder)}"


def flip_bits(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 1, 2, 8, 64))):
        if content:
            content[draw.randrange(min(len(content), draw.choice((8, 200, 2000, len(content)))))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def cut_off(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content) + 1)])


def put_in(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    at = draw.randrange(len(content) + 1)
    path.write_bytes(content[:at] + draw.randbytes(draw.choice((1, 8, 100))) + content[at:])


def set_length(path: Path, draw: random.Random) -> None:
    """The first eight bytes, which a tensor file has for the length of its header."""
    length = draw.choice((0, 1, 7, 8, 10**6, 2**31, 2**63 - 1, 2**64 - 1))
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])


def exchange(path: Path, draw: random.Random) -> None:
    other = draw.choice(sorted(file for file in path.parent.iterdir() if file.is_file()))
    path.write_bytes(other.read_bytes())


def link(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.symlink_to(draw.choice(("/etc/passwd", "/dev/zero", "nowhere", path.name, "config.json")))


def pipe(path: Path, draw: random.Random) -> None:
    path.unlink()
    if hasattr(os, "mkfifo") and draw.random() < 0.5:
        os.mkfifo(path)
    else:
        path.mkdir()


def rename(path: Path, draw: random.Random) -> None:
    target = path.with_name(draw.choice(("pytorch_model.bin", "model.safetensors", "weights.pkl", "x.json")))
    if not target.is_dir():  # an earlier mutation may have put one there
        path.rename(target)


def set_value(path: Path, draw: random.Random) -> None:
    """One value somewhere in the JSON, or in the header of a tensor file, is replaced."""

    def change(parent: Any, key: Any) -> None:
        parent[key] = draw.choice(VALUES)

    _edit(path, draw, change)


def remove_key(path: Path, draw: random.Random) -> None:
    def change(parent: Any, key: Any) -> None:
        del parent[key]

    _edit(path, draw, change)


def copy_value(path: Path, draw: random.Random) -> None:
    """A value is put where another was: overlapping offsets, two names of one tensor."""
    places: list[Any] = []

    def change(parent: Any, key: Any) -> None:
        places.append(copy.deepcopy(parent[key]))
        if len(places) > 1:
            parent[key] = places[0]

    _edit(path, draw, change, times=2)


def add_key(path: Path, draw: random.Random) -> None:
    def change(parent: Any, key: Any) -> None:
        if isinstance(parent, dict):
            parent[draw.choice(("auto_map", "model.x", "vocab", "rope_scaling", "\n", "dtype"))] = draw.choice(VALUES)
        else:
            parent.insert(key, draw.choice(VALUES))

    _edit(path, draw, change)


def nest(path: Path, draw: random.Random) -> None:
    depth = draw.choice((100, 5000, 200_000))
    path.write_text(draw.choice(("[" * depth, '{"a":' * depth, "[" * depth + "]" * depth)))


def put_digits(path: Path, draw: random.Random) -> None:
    """A number becomes one that is too long to be read."""
    content = path.read_bytes()
    numbers = list(re.finditer(rb"\d+", content[:100_000]))
    if numbers:
        found = draw.choice(numbers)
        path.write_bytes(content[: found.start()] + HUGE_NUMBER + content[found.end() :])


def twice(path: Path, draw: random.Random) -> None:
    """Every name stands there twice."""
    content, header = _parts(path)
    inner = json.dumps(header, default=str)[1:-1]
    _put_back(path, content, f"{{{inner},{inner}}}".encode())


RAW: list[Callable[[Path, random.Random], None]] = [flip_bits, cut_off, put_in, set_length, exchange, link, pipe, rename, nest]
STRUCTURED: list[Callable[[Path, random.Random], None]] = [
    *(set_value, set_value, set_value, set_value, remove_key, copy_value, add_key, flip_bits, twice, put_digits)
]


def _edit(path: Path, draw: random.Random, change: Callable[[Any, Any], None], times: int = 1) -> None:
    content, header = _parts(path)
    for _ in range(times):
        places = list(_places(header))
        if places:
            change(*draw.choice(places))
    _put_back(path, content, header)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every parent and key below a value, but no more than the first few of a long list or table."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    for key in list(keys)[:40]:
        yield value, key
        yield from _places(value[key])


def _parts(path: Path) -> tuple[bytes | None, Any]:
    """What is behind a header, and the header; or None, and the values of the file. What is neither is an empty table."""
    content = path.read_bytes()
    try:
        match path.suffix:
            case ".safetensors":
                length = int.from_bytes(content[:8], "little")
                return content[8 + length :], json.loads(content[8 : 8 + length])
            case ".npy":
                length = int.from_bytes(content[8:10], "little")
                return content[10 + length :], ast.literal_eval(content[10 : 10 + length].decode())
            case ".jsonl":
                return None, [json.loads(line) for line in content.splitlines()]
            case ".toml":
                return None, tomllib.loads(content.decode())
            case ".jinja":
                return None, re.findall(r"{[{%].*?[%}]}|[^{]+|{", content.decode(), re.DOTALL)
            case _:
                return None, json.loads(content)
    except (ValueError, RecursionError, SyntaxError):
        return None, {}


def _put_back(path: Path, rest: bytes | None, values: Any) -> None:
    if path.suffix == ".safetensors" and rest is not None:
        header = values if isinstance(values, bytes) else json.dumps(values).encode()
        content = len(header).to_bytes(8, "little") + header + rest
    elif path.suffix == ".npy" and rest is not None:
        header = (repr(values) + "\n").encode(errors="surrogatepass")
        content = b"\x93NUMPY\1\0" + (len(header) & 0xFFFF).to_bytes(2, "little") + header + rest
    elif isinstance(values, bytes):
        content = values
    elif path.suffix == ".jsonl" and isinstance(values, list):
        content = "".join(json.dumps(value) + "\n" for value in values).encode()
    elif path.suffix == ".toml" and isinstance(values, dict):
        tables = "".join(
            f"[{json.dumps(name)}]\n" + "".join(f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in table.items())
            for name, table in values.items()
            if isinstance(table, dict)
        )
        content = tables.encode()
    elif path.suffix == ".jinja" and isinstance(values, list):
        content = "".join(value if isinstance(value, str) else json.dumps(value) for value in values).encode(errors="replace")
    else:
        content = json.dumps(values).encode()
    path.write_bytes(content)
