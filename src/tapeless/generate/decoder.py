"""What the engine runs a model through: sequences in slots, each one token longer per call, drawn where the logits are.

A decoder works through a queue: `start` and `advance` add to it and return at once if the decoder can, `collect` waits for the
oldest. On the host each runs when it is called. A row of logits depends on its own sequence alone, bit for bit: not on the other
sequences, its slot, or what of its prefix was reused. Hence a prompt is always run in the same passes: CHUNK tokens each, from
the start of its window.
Tested by: tests/generate/test_decoder.py, tests/generate/test_engine.py."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from tapeless.config import Sampling


@dataclass(frozen=True)
class Request:
    """What a sequence asks for, besides its prompt."""

    sampling: Sampling
    sample: int  # its index: draws are a function of (sampling.seed, sample, position)
    max_tokens: int
    stop: Collection[int]  # ids that end the sequence
    vocab_size: int  # only ids below it are drawn


class Decoder(Protocol):
    """Runs the sequences of an engine, each in its slot, and draws their tokens."""

    capacity: int  # tokens per slot
    reuse: int  # a prefix can be reused in multiples of this many tokens; 0: not at all
    reuse_generated: bool  # whether generated tokens have the same keys and values, bit for bit, as those of a prompt
    lag: int  # how many rounds the engine may queue before it reads the oldest

    def start(self, slot: int, request: Request, ids: list[int], first: int, reused: int) -> None:
        """Begin a sequence, or begin again after its window slid, and queue the draw of its next token. ids: the whole text so
        far, for the position and the repetition penalty; copy it if you keep it. The window is ids[first:], of which the first
        `reused` tokens are in the slot: a multiple of `reuse`, or the whole window if the last start in the slot ran exactly
        these tokens (the logits after them are then known, or the last token is run again)."""

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a slot's window to another slot. If they are all that the last start in `source`
        ran, a start in `target` may reuse the whole."""

    def advance(self, slots: list[int]) -> None:
        """Queue one more token for each of these slots: run the one last drawn there, collected or not, and draw the next."""

    def collect(self) -> list[tuple[int, int]]:
        """(slot, token) of the oldest start or advance in the queue, in its order; waits for it. Logits that are not finite are
        a NonFiniteError, which names a parameter if one is the cause."""
