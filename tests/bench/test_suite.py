"""The published suite: every part is a command that can be given, of a model that can be measured."""

import runpy
import shlex
from pathlib import Path

import pytest

from tapeless.bench.task import Task, measured
from tapeless.cli.main import build_parser
from tapeless.cli.options import chosen

SUITE = runpy.run_path(str(Path(__file__).parents[2] / "bench" / "suite.py"))


@pytest.mark.parametrize("part", SUITE["PARTS"])
def test_a_part_can_be_measured(part: str):
    args = build_parser().parse_args(["bench", *shlex.split(SUITE["PARTS"][part])])
    name, model, train = chosen(args)
    assert Task("ours", model, measured(train, train.seq_len or model.max_seq_len)).tokens > 0
    assert name in part or args.scaling
    assert args.generate == (part in SUITE["GENERATION"])
    assert args.cold == (part in SUITE["TRAINING"])
