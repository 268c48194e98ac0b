"""Ranks as threads of this process: true numbers, without starting processes."""

from collections.abc import Callable, Sequence
from threading import Barrier, Thread
from typing import Any, TypeVar

from torch import Tensor

from tapeless.dist.world import World

T = TypeVar("T")


class _Shared:
    def __init__(self, size: int):
        self.barrier, self.given = Barrier(size, timeout=120), [None] * size


class ThreadRank(World):
    def __init__(self, rank: int, size: int, shared: Any):
        self.rank, self.size, self.local_size, self._shared = rank, size, size, shared

    def _exchanged(self, mine: Any, use: Callable[[list[Any]], T]) -> T:
        """use(what every rank has given), while no rank changes it."""
        self._shared.given[self.rank] = mine
        self._shared.barrier.wait()
        found = use(list(self._shared.given))
        self._shared.barrier.wait()
        return found

    def to_owners(self, flat: Tensor, received: Tensor) -> None:
        start, end = self.spans(len(flat))[self.rank]

        def copy(of_ranks: list[Tensor]) -> None:
            for row, theirs in zip(received, of_ranks, strict=True):
                row.copy_(theirs[start:end])

        self._exchanged(flat, copy)

    def from_owners(self, flat: Tensor) -> None:
        def copy(of_ranks: list[Tensor]) -> None:
            for rank, (start, end) in enumerate(self.spans(len(flat))):
                if rank != self.rank:
                    flat[start:end].copy_(of_ranks[rank][start:end])

        self._exchanged(flat, copy)

    def add_up(self, flat: Tensor) -> None:
        flat.copy_(self._exchanged(flat, lambda of_ranks: sum(of_ranks[1:], of_ranks[0].clone())))

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        return self._exchanged(list(numbers), lambda of_ranks: of_ranks)

    def from_first(self, value: Any) -> Any:
        return self._exchanged(value, lambda of_ranks: of_ranks[0])


def on_ranks(size: int, work: Callable[[World], T]) -> list[T]:
    """work(rank) in `size` threads; the results by rank, or the first error."""
    shared = _Shared(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRank(rank, size, shared))
        except BaseException as error:
            errors.append(error)
            shared.barrier.abort()

    threads = [Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
