"""Processes to be killed, made by fork from one that has everything imported: a second's start each would be most of the time.

The process that forks must be a plain one, with one thread and no product computed in it yet; importing this module imports
what a run would, torch's compiler too, which the dry run of the reference ops loads."""

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path

for name in ("torch._dynamo", "tapeless.runner", "tapeless.report.page", "tapeless.kernels.cpu.ops"):
    with suppress(ImportError):  # the kernels need numba
        import_module(name)

KILLED = -signal.SIGKILL


class Child:
    def __init__(self, work: Callable[[], int], errors: Path | str = os.devnull, output: Path | str = os.devnull):
        """work: its exit status. errors, output: where stderr and stdout go."""
        self.pid = os.fork()
        if self.pid == 0:
            status = 70  # as of software that fails where nobody thought it could
            try:
                for number, path in ((1, output), (2, errors)):
                    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), number)
                status = work()
                with suppress(OSError):  # as the interpreter does at its end
                    sys.stdout.flush()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """The exit status, negative for a signal."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def wait_for(self, seconds: float) -> int | None:
        """The same; None where it still runs then."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.001)
        return None


def killed_at_random(work: Callable[[], int], draw: random.Random, longest: float, output: Path | str = os.devnull) -> int:
    """Its status, or KILLED after a random time."""
    child = Child(work, output, output)
    status = child.wait_for(draw.uniform(0.0, longest))
    if status is not None:
        return status
    child.kill()
    return child.wait()
