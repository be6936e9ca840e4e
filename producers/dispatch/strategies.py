"""Which of the workers with room gets the next order. Pure functions of the candidates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from schemas.identifiers import PolicyVersion


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that may take an order: what it can sample at once, and what it still owes."""

    worker_id: str
    incarnation: str
    version: PolicyVersion
    capacity: int
    sequences: int
    predicted_tokens: int

    def has_room(self, samples: int, overcommit: float) -> bool:
        """Whether a slot is free now, or the order stays within the overcommitted capacity."""
        return self.sequences < self.capacity or self.sequences + samples <= self.capacity * overcommit


Strategy = Callable[[Sequence[Candidate], str], Candidate]


def least_loaded(candidates: Sequence[Candidate], previous: str) -> Candidate:
    """The one with the fewest predicted tokens per slot; among equals, the one with the newest weights."""
    return min(
        candidates,
        key=lambda worker: (
            worker.predicted_tokens / max(1, worker.capacity),
            -worker.version.number,
            worker.worker_id,
        ),
    )


def round_robin(candidates: Sequence[Candidate], previous: str) -> Candidate:
    """The one that follows the previous choice in the order of names."""
    ordered = sorted(candidates, key=lambda worker: worker.worker_id)
    return next((worker for worker in ordered if worker.worker_id > previous), ordered[0])


STRATEGIES: dict[str, Strategy] = {"least_loaded": least_loaded, "round_robin": round_robin}
