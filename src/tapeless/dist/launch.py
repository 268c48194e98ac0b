"""`--ranks N`: the same command in N processes on this machine, as torchrun would start them.

When a rank ends with an error, the others are ended too, and the command ends with its status. When one is killed, by the
kernel for its memory or by a failing machine, the same command is started again and continues the run from its last checkpoint,
as often as it comes further. Neither torch nor the run is loaded here.
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
from tapeless.start import LAUNCHER, RESTARTS

GRACE = 10.0  # seconds that a rank has to end after SIGTERM, once another one has failed
POLL = 0.05
ATTEMPTS = 3  # starts from one checkpoint
RESUMABLE = 75  # the status of a run that was stopped
SIGHUP = getattr(signal, "SIGHUP", None)  # Windows has none
FORWARDED = [signal.SIGTERM, signal.SIGINT, *([SIGHUP] if SIGHUP is not None else [])]


def launch(arguments: Sequence[str], ranks: int, *, saved: Callable[[], str]) -> int:
    """Exit status of `tapeless ARGUMENTS` on so many ranks. saved: names the newest checkpoint."""
    starts: list[str] = []  # the checkpoint before each
    while True:
        starts.append(saved())
        group = _Group(arguments, ranks, restarts=len(starts) - 1)
        status = group.run()
        if status >= 0 or group.signalled:
            return 128 - status if status < 0 else status
        killed = f"rank {group.ended_first} was ended by {signal.Signals(-status).name}"
        if starts.count(saved()) == ATTEMPTS:
            raise RanksError(f"{killed}; {ATTEMPTS} starts have saved no further step")
        complain(f"{killed}; all {ranks} continue from the last checkpoint")


class _Group:
    """The processes of one start."""

    def __init__(self, arguments: Sequence[str], ranks: int, *, restarts: int):
        self.signalled = False  # whether this process was asked to end
        self.ended_first = 0
        self._ranks = ranks
        self._processes: list[subprocess.Popen[bytes]] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        threads = max(1, (os.cpu_count() or 1) // ranks)
        world = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        world |= {RESTARTS: restarts, LAUNCHER: os.getpid()}
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        self._environment = {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": loopback, **os.environ}
        self._environment |= {name: str(value) for name, value in world.items()}
        self._command = [sys.executable, "-m", "tapeless", *arguments]

    def run(self) -> int:
        """The status of the rank that failed first, else of rank 0, which ends last."""
        before = {number: signal.getsignal(number) for number in FORWARDED}
        try:
            for number, handler in before.items():  # first: a signal that ended this process would leave ranks behind
                if handler is not signal.SIG_IGN:
                    signal.signal(number, self._forward)
            for rank in range(self._ranks):
                self._start(rank)
            if self.signalled:  # meanwhile
                self._send(signal.SIGTERM)
            while not self._failed() and self._processes[0].poll() is None:
                time.sleep(POLL)
            self.ended_first = (self._failed() or [0])[0]
            return self._processes[self.ended_first].returncode
        finally:
            self._end()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self, rank: int) -> None:
        """In a process group of its own: a terminal's Ctrl-C reaches each rank once, by this process."""
        environment = self._environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        self._processes.append(subprocess.Popen(self._command, env=environment, process_group=0))

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """The ranks stop together, and save. A second signal ends them, also one that waits for another. A closing terminal
        sends SIGHUP twice, which is one."""
        if self.signalled and number != SIGHUP:
            self._kill()
        self.signalled = True
        self._send(number)

    def _send(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _failed(self) -> list[int]:
        """The ranks that ended with an error, those that were killed first: the others may have failed for want of them."""
        ended = [(process.poll(), rank) for rank, process in enumerate(self._processes)]
        return [rank for status, rank in sorted(ended, key=lambda e: e[0] or 0) if status not in (None, 0, RESUMABLE)]

    def _end(self) -> None:
        """Those that are left."""
        deadline = time.monotonic() + GRACE
        if any(process.poll() != 0 for process in self._processes[:1]):
            self._send(signal.SIGTERM)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._kill()
        for process in self._processes:
            process.wait()
