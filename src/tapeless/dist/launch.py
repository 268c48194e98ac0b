"""`--ranks N`: the same command in N processes on this machine, as torchrun would start them.

When a rank ends with an error, the others are ended too, and the command ends with its status. When one is killed, by the
kernel for its memory or by a failing machine, all are started again and the run continues from its last checkpoint, as often as
it comes further. Neither torch nor the run is loaded here.
Tested by: tests/dist/test_launch.py."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType

from tapeless.errors import RanksError
from tapeless.output import complain

GRACE = 10.0  # seconds that a rank has to end after SIGTERM, once another one has failed
POLL = 0.05
RESUMABLE = 75  # the status of a run that was stopped
FORWARDED = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]


def launch(arguments: Sequence[str], ranks: int, *, again: Callable[[], Sequence[str] | None]) -> int:
    """Exit status of `tapeless ARGUMENTS` on so many ranks. again: the arguments that continue after a rank was killed; None if
    there is nothing to continue."""
    while True:
        group = _Group(arguments, ranks)
        status = group.wait()
        if status >= 0 or group.signalled:
            return 128 - status if status < 0 else status
        killed = f"rank {group.ended_first} was ended by {signal.Signals(-status).name}"
        following = again()
        if following is None:
            raise RanksError(f"{killed}; nothing to continue: no step was saved")
        complain(f"{killed}; all {ranks} continue from the last checkpoint")
        arguments = following


class _Group:
    """The processes of one start."""

    def __init__(self, arguments: Sequence[str], ranks: int):
        self.signalled = False  # whether this process was asked to end
        self.ended_first = 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        threads = max(1, (os.cpu_count() or 1) // ranks)
        world = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo", **os.environ}
        environment |= {name: str(value) for name, value in world.items()}
        command = [sys.executable, "-m", "tapeless", *arguments]
        self._before = {number: signal.getsignal(number) for number in FORWARDED}
        self._processes = [  # in process groups of their own: a terminal's Ctrl-C reaches each once, by this process
            subprocess.Popen(command, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, process_group=0)
            for rank in range(ranks)
        ]
        for number, handler in self._before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._forward)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """The ranks stop together, and save."""
        self.signalled = True
        self._send(number)

    def _send(self, number: int) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def wait(self) -> int:
        """The status of the rank that failed first, else of rank 0, which ends last."""
        try:
            while not self._failed() and self._processes[0].poll() is None:
                time.sleep(POLL)
            self.ended_first = (self._failed() or [0])[0]
            self._end()
            return self._processes[self.ended_first].returncode
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _failed(self) -> list[int]:
        """The ranks that ended with an error, those that were killed first: the others may have failed for want of them."""
        ended = [(process.poll(), rank) for rank, process in enumerate(self._processes)]
        return [rank for status, rank in sorted(ended, key=lambda e: e[0] or 0) if status not in (None, 0, RESUMABLE)]

    def _end(self) -> None:
        """Those that are left."""
        deadline = time.monotonic() + GRACE
        if self._processes[0].poll() != 0:
            self._send(signal.SIGTERM)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._send(signal.SIGKILL)
        for process in self._processes:
            process.wait()
