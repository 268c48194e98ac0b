"""What is free: the least of the machine's memory and of every control group above this process."""

import sys
from pathlib import Path

import pytest

from tapeless.training import resources

GIB = 2**30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """8 GiB available, and no control groups."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {8 * GIB // 1024} kB\n")
    monkeypatch.setattr(resources, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(resources, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(resources, "MOUNT", tmp_path / "mount")
    return tmp_path


def group(folder: Path, limit: object, used: int, cache: int, *, version: int = 2) -> None:
    _, limit_file, used_file, cache_name = resources.LAYOUTS[version]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / limit_file).write_text(f"{limit}\n")
    (folder / used_file).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{cache_name} {cache}\n")


def test_without_groups_it_is_the_machine(machine: Path):
    assert resources.available_bytes("cpu") == 8 * GIB


def test_the_tightest_group_counts_and_its_page_cache_is_free(machine: Path):
    (machine / "cgroup").write_text("0::/outer/inner\n")
    group(machine / "mount" / "outer" / "inner", "max", 3 * GIB, 0)
    group(machine / "mount" / "outer", 4 * GIB, 3 * GIB, GIB)
    assert resources.available_bytes("cpu") == 2 * GIB
    group(machine / "mount", GIB, GIB // 2, 0)
    assert resources.available_bytes("cpu") == GIB // 2


def test_the_older_kind_of_group(machine: Path):
    (machine / "cgroup").write_text("5:devices:/x\n4:cpu,memory:/job\n0::/\n")
    group(machine / "mount" / "memory" / "job", 3 * GIB, 2 * GIB, 0, version=1)
    assert resources.available_bytes("cpu") == GIB


def test_a_group_that_is_over_its_limit_leaves_nothing(machine: Path):
    (machine / "cgroup").write_text("0::/\n")
    group(machine / "mount", GIB, 2 * GIB, 0)
    assert resources.available_bytes("cpu") == 0


def test_paths_of_the_host_are_left_out(machine: Path):
    (machine / "cgroup").write_text("0::/docker/123\n")
    assert resources.available_bytes("cpu") == 8 * GIB


def test_a_system_that_does_not_tell_refuses_nothing(machine: Path, monkeypatch: pytest.MonkeyPatch):
    (machine / "meminfo").unlink()
    monkeypatch.delattr(resources.os, "sysconf")
    assert resources.available_bytes("cpu") == sys.maxsize


def test_the_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path):
    assert resources.free_disk(tmp_path / "not" / "yet") == pytest.approx(resources.free_disk(tmp_path), rel=0.01)
