"""What torch takes from a GPU for given tensors: its caching allocator, with addresses and no memory.

Torch asks the driver for segments, cuts blocks from them, and joins neighbours that are free again. A request takes the
smallest free block that is large enough, so gaps remain: 2 to 6 % of a step's memory on an H200. Small and large requests have
segments of their own, and so has each CUDA graph, whose segments nothing else can use.
The sizes are those of torch's default settings (PYTORCH_CUDA_ALLOC_CONF may change them).
Tested by: tests/estimate/test_caching_allocator.py; against measurements by acceptance/estimate_elsewhere.py."""

from bisect import bisect_left, insort
from dataclasses import dataclass

MIB = 2**20
UNIT = 512  # every block is a multiple of it
SMALL = MIB  # the largest small request
SMALL_SEGMENT, LARGE_SEGMENT, LARGE_UNIT = 2 * MIB, 20 * MIB, 2 * MIB
OWN_SEGMENT = 10 * MIB  # from here on a segment is made for the request


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


@dataclass(eq=False)
class Block:
    size: int
    small: bool
    address: int  # for the order among blocks of one size
    before: "Block | None" = None  # neighbours in the segment
    after: "Block | None" = None
    free: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.address


class Pool:
    """Segments that serve one another's requests: all outside of graphs, or those of one graph."""

    def __init__(self) -> None:
        self.reserved = 0  # bytes of all segments
        self._end = 0  # the next segment's address
        self._free: dict[bool, list[Block]] = {True: [], False: []}  # small ones and large ones, sorted

    def allocate(self, size: int) -> Block:
        size = max(UNIT, _rounded(size, UNIT))
        small = size <= SMALL
        free = self._free[small]
        i = bisect_left(free, (size, -1), key=lambda block: block.key)
        block = free.pop(i) if i < len(free) else self._segment(size, small)
        block.free = False
        left = block.size - size
        if left >= UNIT if small else left > SMALL:
            rest = Block(left, small, block.address + size, before=block, after=block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.size, block.after = size, rest
            self._add(rest)
        return block

    def release(self, block: Block) -> None:
        if block.after is not None and block.after.free:
            self._remove(block.after)
            self._join(block, block.after)
        if block.before is not None and block.before.free:
            self._remove(block.before)
            block = self._join(block.before, block)
        self._add(block)

    def empty(self) -> None:
        """Give back the segments that are free as a whole, as torch does where a request finds no memory."""
        for small, blocks in self._free.items():
            self._free[small] = [block for block in blocks if block.before or block.after]
            self.reserved -= sum(block.size for block in blocks) - sum(block.size for block in self._free[small])

    def _segment(self, size: int, small: bool) -> Block:
        whole = SMALL_SEGMENT if small else LARGE_SEGMENT if size < OWN_SEGMENT else _rounded(size, LARGE_UNIT)
        block = Block(whole, small, self._end)
        self.reserved, self._end = self.reserved + whole, self._end + whole
        return block

    @staticmethod
    def _join(block: Block, after: Block) -> Block:
        """One block of two neighbours."""
        block.size, block.after = block.size + after.size, after.after
        if block.after is not None:
            block.after.before = block
        return block

    def _add(self, block: Block) -> None:
        block.free = True
        insort(self._free[block.small], block, key=lambda block: block.key)

    def _remove(self, block: Block) -> None:
        free = self._free[block.small]
        del free[bisect_left(free, block.key, key=lambda block: block.key)]
