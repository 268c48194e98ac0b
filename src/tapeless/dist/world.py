"""The ranks that train one model together, and what they exchange.

One process is a rank; torchrun starts them and tells each its number. A world of one rank exchanges nothing. Tensors are moved
and never added on the way, except by `add_up`: where a sum happens, and in which order, is decided by gradient_sum.py.
Tested by: tests/dist/test_world.py."""

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from tapeless.errors import RanksError
from tapeless.start import LAUNCHER, num_ranks, own_rank

TIMEOUT, DEFAULT_TIMEOUT = "TAPELESS_TIMEOUT", 600.0  # seconds that a rank waits for the others: also while one compiles
PREPARATION = timedelta(days=7)  # while the first one prepares something for all: it may read a terabyte of text
Span = tuple[int, int]  # first element, end


class World(ABC):
    """This rank among `size`, numbered from 0."""

    rank: int
    size: int
    local_size: int  # on this machine

    @property
    def is_first(self) -> bool:
        """Whether this rank prints and writes."""
        return self.rank == 0

    def abandoned(self) -> bool:
        """Whether the command that started this rank was killed: nobody forwards signals, or ends it with the others."""
        return False

    def spans(self, length: int) -> list[Span]:
        """A flat buffer in one span for each rank, its owner."""
        share = -(-length // self.size)
        return [(min(length, r * share), min(length, (r + 1) * share)) for r in range(self.size)]

    @abstractmethod
    def to_owners(
        self,
        flat: Tensor,  # (n,) of this rank
        received: Tensor,  # (N, m)
    ) -> None:
        """Send each span of `flat` to its owner; row r of `received` is this rank's span, of rank r."""

    @abstractmethod
    def from_owners(
        self,
        flat: Tensor,  # (n,) of which this rank's span is right
    ) -> None:
        """Fill all other spans with those of their owners."""

    @abstractmethod
    def add_up(
        self,
        flat: Tensor,  # (n,)
    ) -> None:
        """The sum over all ranks, in an order that depends on their number."""

    @abstractmethod
    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers of every rank, by rank: equally many of each."""

    def in_turn(self, mine: Sequence[float], count: int) -> list[float]:
        """`count` numbers, of which rank r has computed every N-th, from the r-th on."""
        if self.size == 1:
            return list(mine)
        most = -(-count // self.size)
        of_ranks = self.gather([*mine, *[0.0] * (most - len(mine))])
        return [of_ranks[i % self.size][i // self.size] for i in range(count)]

    @abstractmethod
    def from_first(self, value: Any) -> Any:
        """The value of rank 0; the others pass anything, and wait for as long as it takes."""


class _Alone(World):
    rank, size, local_size = 0, 1, 1

    def to_owners(self, flat: Tensor, received: Tensor) -> None:
        received[0].copy_(flat)

    def from_owners(self, flat: Tensor) -> None:
        pass

    def add_up(self, flat: Tensor) -> None:
        pass

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        return [list(numbers)]

    def from_first(self, value: Any) -> Any:
        return value


ALONE: World = _Alone()


class Processes(World):
    """The processes that torchrun or launch.py started, in a process group of torch.distributed."""

    def __init__(self, device: torch.device):
        import torch.distributed as dist

        self._dist, self.device = dist, device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        self._patient = dist.new_group(backend="gloo", timeout=PREPARATION)
        self._launcher = os.environ.get(LAUNCHER)  # the parent of this process, while it lives

    def abandoned(self) -> bool:
        return self._launcher not in (None, str(os.getppid()))

    def to_owners(self, flat: Tensor, received: Tensor) -> None:
        sizes = [end - start for start, end in self.spans(len(flat))]
        mine = sizes[self.rank]
        with _exchanging(self):
            self._dist.all_to_all_single(received.view(-1), flat, [mine] * self.size, sizes)

    def from_owners(self, flat: Tensor) -> None:
        spans = enumerate(self.spans(len(flat)))
        with _exchanging(self):
            work = [self._dist.broadcast(flat[a:b], src=rank, async_op=True) for rank, (a, b) in spans if b > a]
            for each in work:
                each.wait()

    def add_up(self, flat: Tensor) -> None:
        with _exchanging(self):
            self._dist.all_reduce(flat)

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        mine = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        with _exchanging(self):
            self._dist.all_gather(found, mine)
        return torch.stack(found).tolist()

    def from_first(self, value: Any) -> Any:
        values = [value]
        with _exchanging(self):
            self._dist.broadcast_object_list(values, src=0, group=self._patient)
        return values[0]


@contextmanager
def _exchanging(world: World) -> Iterator[None]:
    """An exchange fails if another rank has ended, or does not take part."""
    try:
        yield
    except RuntimeError as error:
        words = str(error).splitlines()[0]
        if "closed by peer" in words or "reset by peer" in words or "Broken pipe" in words:
            words = "one of them has ended"
        raise RanksError(f"rank {world.rank} of {world.size} could not exchange data with the others: {words}") from error


@contextmanager
def joined(device: str) -> Iterator[World]:
    """The world of this process: alone, unless it was started as a rank."""
    if num_ranks() == 1:
        yield ALONE
        return
    import torch.distributed as dist

    place = torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    seconds = float(os.environ.get(TIMEOUT, DEFAULT_TIMEOUT))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.init_process_group("nccl" if place.type == "cuda" else "gloo", timeout=timedelta(seconds=seconds))
        world = Processes(place)
    except (RuntimeError, ValueError) as error:  # a port that is taken, no MASTER_ADDR, a rank that does not come
        words = str(error).splitlines()[0]
        raise RanksError(f"rank {own_rank()} of {num_ranks()} could not join the others: {words}") from error
    yield world
    dist.destroy_process_group()  # not after an error: the others may be waiting
