"""Cold and warm: two processes that share one fresh folder."""

from pathlib import Path

from bench_fixtures import FakeWorker, task

from tapeless.bench.first_step import first_steps


def test_a_fresh_folder_for_each_contender_and_twice_the_same():
    folders: list[str] = []

    def start(each, caches):
        assert Path(caches).is_dir()
        folders.append(caches)
        return FakeWorker(each, 0.1, [], broken=each.contender == "hf")

    found = first_steps([task("ours"), task("compile"), task("hf")], start)
    assert found == {label: {"cold": 1.5, "warm": 1.5} for label in ("ours float32", "compile float32")}
    assert folders[0] == folders[1] != folders[2] == folders[3]
    assert not any(Path(folder).exists() for folder in folders)
