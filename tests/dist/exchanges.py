"""Everything that ranks can exchange; as a script, by the processes of a world."""

import json
import sys
import time
from typing import Any

import torch

from tapeless.dist.world import World, joined


def exchanges(world: World) -> dict[str, Any]:
    """Everything that a world can do."""
    flat = torch.arange(11.0) + 100 * world.rank
    start, end = world.spans(11)[world.rank]
    received = torch.zeros(world.size, end - start)
    world.to_owners(flat, received)
    spread, added = flat.clone(), flat.bfloat16()
    world.from_owners(spread)
    world.add_up(added)
    gathered = world.gather([world.rank + 0.1, 1e300])
    turns = world.in_turn([10.0 * i for i in range(world.rank, 5, world.size)], 5)
    told = world.from_first({"path": "a", "rank": world.rank})
    return {
        "received": received.tolist(),
        "spread": spread.tolist(),
        "added": added.tolist(),
        "gathered": gathered,
        "turns": turns,
        "told": told,
    }


if __name__ == "__main__":
    with joined("cpu") as world:
        if world.is_first:
            time.sleep(float(sys.argv[1]))  # it prepares something
        world.from_first(None)
        print(json.dumps(exchanges(world)))
