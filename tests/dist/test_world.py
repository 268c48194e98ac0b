"""Processes exchange what threads as ranks do."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from exchanges import exchanges
from rank_threads import on_ranks

from tapeless.dist.world import joined
from tapeless.errors import RanksError

SCRIPT = Path(__file__).with_name("exchanges.py")


def test_processes_exchange_what_threads_do():
    """Also if the first one needs longer for its preparations than the others wait in an exchange."""
    expected = on_ranks(3, exchanges)
    assert expected[1]["turns"] == [0.0, 10.0, 20.0, 30.0, 40.0]
    assert expected[2]["received"] == [[8.0, 9.0, 10.0], [108.0, 109.0, 110.0], [208.0, 209.0, 210.0]]
    assert expected[0]["spread"] == [*range(4), *range(104, 108), *range(208, 211)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    world["TAPELESS_TIMEOUT"] = "6"
    ranks = [
        subprocess.Popen([sys.executable, SCRIPT, "7"], env=os.environ | world | {"RANK": str(rank)}, stdout=subprocess.PIPE)
        for rank in range(3)
    ]
    assert [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks] == expected


def test_who_cannot_join_says_why(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RanksError, match="rank 1 of 2 could not join the others: .*MASTER_ADDR"), joined("cpu"):
        pass
