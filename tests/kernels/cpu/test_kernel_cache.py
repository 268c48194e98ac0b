"""A cached kernel is complete or absent: whatever happens to its file, the kernel is compiled again and said, never run."""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("numba")
import numba

from tapeless.kernels.cpu import kernel_cache
from tapeless.kernels.cpu.kernel_cache import KernelCache


def twice(x):
    return 2 * x


def cached(folder: Path) -> Callable[[float], float]:
    dispatcher = numba.njit()(twice)  # compiles in a twentieth of a second
    dispatcher._cache = KernelCache(twice, folder)
    return dispatcher


def hits(dispatcher: Callable[[float], float]) -> int:
    return sum(dispatcher.stats.cache_hits.values())


@pytest.fixture(autouse=True)
def again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel_cache, "_warned", set())


def truncated(file: Path, content: bytes) -> None:
    file.write_bytes(content[: len(content) // 2])


def longer(file: Path, content: bytes) -> None:
    file.write_bytes(content + b"more")


def forged(file: Path, content: bytes) -> None:  # by another version of Numba, say
    content = content[kernel_cache.DIGEST : -9]
    file.write_bytes(kernel_cache._digest(file, content) + content)


def flipped(at: int) -> Callable[[Path, bytes], None]:
    def damage(file: Path, content: bytes) -> None:
        changed = bytearray(content)
        changed[at * (len(changed) - 1) // 100] ^= 1 << (at % 8)
        file.write_bytes(changed)

    return damage


def a_folder(file: Path, content: bytes) -> None:
    file.unlink()
    (file / "in").mkdir(parents=True)


def a_pipe(file: Path, content: bytes) -> None:
    file.unlink()
    os.mkfifo(file)


def a_loop(file: Path, content: bytes) -> None:
    file.unlink()
    file.symlink_to(file.name)


def zeros(file: Path, content: bytes) -> None:
    file.write_bytes(bytes(len(content)))


def empty(file: Path, content: bytes) -> None:
    file.write_bytes(b"")


DAMAGE = [truncated, longer, forged, a_folder, a_loop, zeros, empty, *map(flipped, range(0, 101, 6))]
DAMAGE += [a_pipe] if hasattr(os, "mkfifo") else []


def test_a_kernel_in_the_place_of_another_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    assert cached(tmp_path)(21.0) == 42.0
    (first,) = tmp_path.glob("*.kernel")
    assert cached(tmp_path)(21) == 42  # of integers
    (second,) = set(tmp_path.glob("*.kernel")) - {first}
    second.write_bytes(first.read_bytes())
    kernel = cached(tmp_path)
    assert (kernel(21), hits(kernel)) == (42, 0)
    assert "is damaged" in caplog.text


def test_at_least_24_kinds_of_damage_are_repaired(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    assert cached(tmp_path)(21.0) == 42.0
    (file,) = tmp_path.glob("*.kernel")
    content = file.read_bytes()
    assert len(DAMAGE) >= 24
    for damage in DAMAGE:
        damage(file, content)
        caplog.clear()
        kernel = cached(tmp_path)
        assert (kernel(21.0), hits(kernel)) == (42.0, 0)
        assert "is damaged" in caplog.text
        assert "it is compiled again" in caplog.text
        healed = cached(tmp_path)
        assert (healed(21.0), hits(healed)) == (42.0, 1)


@pytest.mark.parametrize("what", ["a file in its place", "no permission"])
def test_without_a_cache_it_is_compiled_in_memory(tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache" if what.startswith("a file") else Path("/proc/1/cache")
    caplog.set_level(logging.WARNING)
    assert cached(folder)(21.0) == 42.0
    assert cached(folder)(2.0) == 4.0
    (record,) = caplog.records  # once in a process
    assert "cannot be cached in" in record.getMessage()


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        assert cached(tmp_path)(21.0) == 42.0
    assert "No space left on device; they are compiled again by every process" in caplog.text
    assert not list(tmp_path.iterdir())


def test_another_signature_is_another_file(tmp_path: Path):
    kernel = cached(tmp_path)
    assert kernel(2.0) == kernel(2) == 4
    assert len(list(tmp_path.glob("*.kernel"))) == 2


def test_written_by_several_at_once(tmp_path: Path):
    """In threads, whose writes interleave as those of processes do."""
    results: list[float] = []
    threads = [threading.Thread(target=lambda: results.append(cached(tmp_path)(21.0))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [42.0] * 8
    assert len(list(tmp_path.iterdir())) == 1
    kernel = cached(tmp_path)
    assert (kernel(21.0), hits(kernel)) == (42.0, 1)


def test_without_the_compiler_the_reference_ops_run(tmp_path: Path):
    code = "import torch; from tapeless.kernels.choose import choose; c = choose('auto', torch.device('cpu'), 'float32')"
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    command = [sys.executable, "-c", f"{code}; print(c.ops.name, c.reason)"]
    said = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    assert said.startswith("reference plain torch: ")
    assert "NUMBA_DISABLE_JIT is set" in said
