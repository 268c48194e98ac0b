"""`tapeless presets`: every preset, with what `tapeless estimate` says of it."""

import json

import pytest

from tapeless.cli.main import main
from tapeless.estimate import presets
from tapeless.estimate.fit import gib


def test_the_list(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("numba")
    monkeypatch.setattr("tapeless.kernels.choose._AUTOMATIC", {"cpu": "cpu", "cuda": "triton"})
    monkeypatch.setattr(presets, "available_bytes", lambda device: 20 * 10**9)
    monkeypatch.setattr(presets, "preset_names", lambda: ["tiny", "gpt2", "llama-1b"])
    assert main(["presets", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["preset"]: row for row in found["presets"]}
    assert rows["llama-1b"]["fits"] == ["h100", "h200"]
    assert rows["tiny"]["fits"] == ["this CPU", "rtx4090", "h100", "h200"]
    assert (rows["gpt2"]["parameters"], rows["gpt2"]["layers"], rows["gpt2"]["width"]) == (124_439_808, 12, 768)
    text = presets.text(found).splitlines()
    line = next(line for line in text if line.startswith("llama-1b "))
    assert gib(rows["llama-1b"]["gpu"]) in line
    assert "h100, h200" in line
    main(["estimate", "--preset", "tiny", "--device", "h200", "--dtype", "bfloat16", "--no-calibrate", "--json"])
    assert json.loads(capsys.readouterr().out)["memory"]["peak"] == rows["tiny"]["gpu"]
