"""Completions that call tools: they leave the batch for as long as the environment takes, and come back behind it."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.simulation.replica import Completion, Replica

if TYPE_CHECKING:
    from benchmarks.simulation.world import World


class Environment:
    """Who is away, whose, and what is left of each. A call gives slot and cache up, its context is prefilled again."""

    def __init__(self, world: "World", seed: int) -> None:
        self._world, self._tools = world, world.workload.tools
        self._random = np.random.default_rng([seed, 1])
        self._left: dict[Completion, list[tuple[float, int]]] = {}
        self._away: dict[int, dict[Completion, None]] = {}
        self._home: dict[Completion, Replica] = {}

    def away(self, replica: Replica) -> Sequence[Completion]:
        """Completions of a replica that wait for a tool."""
        return tuple(self._away.get(replica.number, ()))

    def cut(self, completions: Sequence[Completion]) -> None:
        """Draw their calls: how many, behind which token, and what each takes."""
        tools = self._tools
        if tools is None:
            return
        calls = np.minimum(self._random.geometric(1 / (1 + tools.mean_calls), len(completions)) - 1, tools.most_calls)
        waits = tools.seconds.quantile(self._random.random(int(calls.sum()))) / tools.per_s
        number = 0
        for completion, count in zip(completions, calls.tolist(), strict=True):
            cuts = sorted(self._random.integers(1, completion.length, count).tolist()) if completion.length > 1 else []
            ends = [*cuts, completion.length]
            wait_s = waits[number : number + len(cuts)].tolist()
            number += count
            if cuts:
                self._left[completion] = list(zip(wait_s, ends[1:], strict=True))[::-1]
                completion.length = ends[0]

    def takes(self, completion: Completion, replica: Replica) -> bool:
        """Whether what has ended is a turn, behind which a tool is called."""
        left = self._left.get(completion)
        if not left:
            self._left.pop(completion, None)
            return False
        wait_s, completion.length = left.pop()
        self._home[completion] = replica
        self._away.setdefault(replica.number, {})[completion] = None
        self._world.at(self._world.now + wait_s, partial(self._back, completion))
        return True

    def rehome(self, completion: Completion, source: Replica, target: Replica) -> None:
        """It comes back to another replica."""
        del self._away[source.number][completion]
        self._away.setdefault(target.number, {})[completion] = None
        self._home[completion] = target

    def _back(self, completion: Completion) -> None:
        replica = self._home.pop(completion)
        del self._away[replica.number][completion]
        replica.sync(self._world.now)
        replica.offer([completion])
        self._world.touch(replica)
