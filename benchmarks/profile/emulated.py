"""When the profiled batch would end on the emulated engine: pure, in no time."""

from collections.abc import Sequence as Sizes

from streamrl.producers.generation.engines.emulated import EmulatedBatch, EmulatedSequence, TokensSampled
from streamrl.schemas.profiles import DecodeCurve, DecodeSettings


def finishes(decode: DecodeSettings, slots: int, sizes: Sizes[tuple[int, int]]) -> list[float]:
    """When each request is over, in seconds after they all arrived."""
    batch: EmulatedBatch[int] = EmulatedBatch(DecodeCurve(decode), slots, 0)
    sequences = [EmulatedSequence(prompt, length) for prompt, length in sizes]
    for sequence in sequences:
        batch.arrive(sequence, 0.0)
    over = {
        event.sequence: event.at for event in batch.advance(1e9) if isinstance(event, TokensSampled) and event.is_over
    }
    return [over[sequence] for sequence in sequences]
