"""The sum of the gradients of a step's micro-batches over the ranks that compute them.

Micro-batch i is computed by rank i % N, in round i // N. `InOrder` gives the same bits on any number of ranks: the gradient of a
micro-batch depends on weights and data alone, and to every element the micro-batches are added in their order, 0 to M - 1.
After each round every rank sends each span of its gradient to the span's owner, who adds what it received in the order of the
ranks. Ranks that have nothing to compute in the last round send what no one adds.
    memory per rank    the gradients, what is received (as much again), and the sum of the own span (1 / N)
    traffic            of a round as much as one reduce-scatter; in the end one all-gather
`InPlace` adds a rank's own micro-batches as the backward pass does, and the ranks' sums in whatever order the transport has:
less memory, and one exchange in a step.
Tested by: tests/dist/test_gradient_sum.py."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from tapeless.dist.world import ALONE, World


class GradientSum(ABC):
    accumulates: bool  # whether a backward pass adds to the gradients of the one before

    def __init__(
        self,
        world: World,
        num_micro_batches: int,
        grads: Tensor,  # (n,) where backward passes write, and where the sum is in the end
    ):
        self.world, self.num_micro_batches, self.grads = world, num_micro_batches, grads
        self.mine = range(world.rank, num_micro_batches, world.size)  # the micro-batches of this rank
        self.rounds = -(-num_micro_batches // world.size)

    @abstractmethod
    def add(self, round_: int) -> None:
        """Called by all ranks after each round."""

    @abstractmethod
    def finish(self) -> None:
        """The sum becomes the gradients of every rank."""

    def in_order(self, losses: Sequence[Tensor]) -> list[Tensor]:  # () each
        """The losses of all micro-batches, from those of this rank's."""
        return [losses[0].new_tensor(x) for x in self.world.in_turn([float(x) for x in losses], self.num_micro_batches)]


class InPlace(GradientSum):
    accumulates = True

    def add(self, round_: int) -> None:
        pass

    def finish(self) -> None:
        self.world.add_up(self.grads)


class InOrder(GradientSum):
    accumulates = False

    def __init__(self, world: World, num_micro_batches: int, grads: Tensor):
        super().__init__(world, num_micro_batches, grads)
        start, end = world.spans(len(grads))[world.rank]
        self._mine = grads[start:end]  # (m,)
        self._total = self._mine.new_zeros(end - start)
        self._received = grads.new_zeros(world.size, end - start) if world.size > 1 else self._mine.view(1, -1)

    def add(self, round_: int) -> None:
        if self.world.size > 1:
            self.world.to_owners(self.grads, self._received)
        computed = min(self.world.size, self.num_micro_batches - round_ * self.world.size)
        for i, of_rank in enumerate(self._received[:computed]):
            if round_ or i:
                self._total += of_rank
            else:
                self._total.copy_(of_rank)  # not 0 + x, which is another zero for x = -0

    def finish(self) -> None:
        self._mine.copy_(self._total)
        self.world.from_owners(self.grads)


def gradient_sum(grads: Tensor, num_micro_batches: int, world: World = ALONE, *, rank_invariant: bool = False) -> GradientSum:
    if num_micro_batches == 1 or not rank_invariant:
        return InPlace(world, num_micro_batches, grads)
    return InOrder(world, num_micro_batches, grads)
