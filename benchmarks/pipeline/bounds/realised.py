"""When completions really end that wait in given queues: the emulated engine's own batch, without waiting."""

from collections.abc import Sequence
from dataclasses import dataclass

from producers.generation.engines.emulated import EmulatedBatch, TokensSampled
from producers.generation.engines.emulated import EmulatedSequence as Completion
from schemas.profiles import DecodeCurve

FOREVER_S = 1e9


@dataclass(frozen=True)
class Queue:
    """One worker's completions by their real lengths, in the order in which they get slots; ``slots`` run at once."""

    lengths: tuple[int, ...]
    slots: int


def finish_times(queue: Queue, curve: DecodeCurve) -> list[float]:
    """Seconds from the start to each completion's end, in the order of the queue."""
    batch = EmulatedBatch(curve, max(1, queue.slots), 0)
    completions = [Completion(0, length) for length in queue.lengths]
    for completion in completions:
        batch.arrive(completion, 0.0)
    ended = {
        id(one.sequence): one.at for one in batch.advance(FOREVER_S) if isinstance(one, TokensSampled) and one.is_over
    }
    return [ended[id(completion)] for completion in completions]


def round_robin(lengths: Sequence[int], workers: int, slots: int) -> list[Queue]:
    """Completion i goes to worker i modulo the number of workers."""
    return [Queue(tuple(lengths[worker::workers]), slots) for worker in range(workers)]


def ended(queues: Sequence[Queue], curve: DecodeCurve) -> list[tuple[float, int]]:
    """End and length of every completion, in the order of their ends."""
    return sorted(
        (at, length) for queue in queues for at, length in zip(finish_times(queue, curve), queue.lengths, strict=True)
    )


def makespan(queues: Sequence[Queue], curve: DecodeCurve) -> float:
    """Seconds until the last completion ends."""
    return max(at for at, _ in ended(queues, curve))
