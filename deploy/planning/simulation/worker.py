"""A worker of the simulation: the emulated engine's own timeline, woken by events. Knows no dispatcher."""

import math
from collections.abc import Callable
from functools import partial

from deploy.planning.simulation.clockwork import Clockwork
from deploy.planning.simulation.work import Plant, Work
from producers.generation.engines.emulated.timeline import Adopted, Sequence, Timeline

Finished = Callable[[int, Work, int, tuple[int, int]], None]
"""Told of a completion: the worker, the group, the sample's index, the oldest and the newest version of its tokens."""


class SimulatedWorker:
    """``number``: its place in the fleet; ``held``: the version its engine samples with, -1 before the first."""

    def __init__(
        self, number: int, plant: Plant, clock: Clockwork, finished: Finished, adopted: "Callable[[int, int], None]"
    ) -> None:
        self.number = number
        self.held = -1
        self.slot_seconds = self.idle_seconds = 0.0
        self._clock = clock
        self._timeline: Timeline[int] = Timeline(plant.curve, plant.slots, 0)
        self._works: dict[Sequence, tuple[Work, int]] = {}
        self._finished, self._adopted = finished, adopted
        self._looked_at = 0.0
        self._wake: float | None = None

    def take(self, work: Work) -> None:
        """All samples of a group ask for slots."""
        self._turn()
        for index, length in enumerate(work.lengths):
            sequence = Sequence(work.prompt_tokens, length)
            self._works[sequence] = work, index
            self._timeline.arrive(sequence, self._clock.now)
        self._turn()

    def adopt(self, version: int) -> None:
        """Weights were fetched."""
        self._turn()
        self._timeline.adopt(version, self._clock.now)
        self._turn()

    def reckon(self) -> None:
        """Count the time since the last look."""
        elapsed = self._clock.now - self._looked_at
        self.slot_seconds += elapsed * self._timeline.running
        self.idle_seconds += elapsed * (self._timeline.running == 0)
        self._looked_at = self._clock.now

    def _turn(self) -> None:
        self.reckon()
        for event in self._timeline.advance(self._clock.now):
            if isinstance(event, Adopted):
                self.held = event.version
                self._adopted(self.number, event.version)
            elif event.is_over:
                work, index = self._works.pop(event.sequence)
                self._finished(self.number, work, index, (event.parts[0][0], event.parts[-1][0]))
        wake = self._timeline.next_wake()
        if wake is not None and (self._wake is None or wake != self._wake):
            self._wake = max(wake, math.nextafter(self._clock.now, math.inf))
            self._clock.at(self._wake, partial(self._woken, self._wake))

    def _woken(self, due: float) -> None:
        if self._wake == due:
            self._wake = None
            self._turn()
