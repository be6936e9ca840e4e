import random
from itertools import groupby

import pytest

from streamrl.producers.generation.engines.emulated import (
    EmulatedBatch,
    EmulatedSequence,
    TokensSampled,
    WeightsAdopted,
)
from streamrl.schemas.profiles import DecodeCurve, DecodeSettings
from tests.producers.generation.engines.emulated.stepwise import Completion, simulate

CURVES = [
    DecodeSettings(),
    DecodeSettings(context_s_per_token=1e-6, prefill_s_per_token=1e-4, adopt_s=0.7),
    DecodeSettings(
        table=((1, 0.0084), (4, 0.009), (16, 0.0095)), prefill_s=2e-3, prefill_s_per_token=1e-3, adopt_s=0.05
    ),
    DecodeSettings(context_s_per_token=3e-5, chunk_tokens=7),
    DecodeSettings(context_s_per_token=3e-5, padding_counts=True, prefill_s_per_token=1e-3),
    DecodeSettings(context_s_per_token=1e-5, padding_counts=True, kv_tokens=300),
    DecodeSettings(prefill_s_per_token=1e-3, adopt_s=0.05, kv_tokens=300),
    DecodeSettings(prefill_s=1e-3, chunk_tokens=5, kv_tokens=150),
]


def _workload(rng: random.Random, number: int, *, drops: bool) -> tuple[list[Completion], list[float]]:
    completions = []
    for arrival in sorted(rng.choice([0.0, rng.uniform(0, 6)]) for _ in range(number)):
        dropped = arrival + rng.uniform(0, 5) if drops and rng.random() < 0.2 else None
        completions.append(Completion(arrival, rng.randint(1, 60), int(rng.lognormvariate(4, 1)) + 1, dropped))
    return completions, sorted(rng.uniform(0, 8) for _ in range(4))


def _fast(
    curve: DecodeCurve,
    slots: int,
    completions: list[Completion],
    adoptions: list[float],
    looks: list[float],
    *,
    recomputes: bool,
) -> tuple[list[Completion], dict[int, float]]:
    """The same through a batch that is advanced to ``looks``, to what is told, and where it asks to be."""
    batch = EmulatedBatch(curve, slots, 0, recomputes=recomputes)
    found = [Completion(one.arrival, one.prompt, one.length) for one in completions]
    sequences = [EmulatedSequence(one.prompt, one.length) for one in completions]
    told = [(one.arrival, 0, index) for index, one in enumerate(completions)]
    told += [(one.dropped_at, 1, index) for index, one in enumerate(completions) if one.dropped_at is not None]
    told += [(at, 2, index + 1) for index, at in enumerate(adoptions)] + [(at, 3, 0) for at in looks]
    adopted: dict[int, float] = {}

    def hear(until: float) -> None:
        for event in batch.advance(until):
            if isinstance(event, WeightsAdopted):
                adopted[event.version] = event.at
            else:
                _note(found[sequences.index(event.sequence)], event)

    for at, kind, index in sorted(told):
        while (wake := batch.next_wake()) is not None and wake < at:
            hear(wake)
        if kind == 0:
            batch.arrive(sequences[index], at)
        elif kind == 1 and index % 2:
            batch.abort(sequences[index], at)
        elif kind == 1:
            batch.interrupt(sequences[index], at)
        elif kind == 2:
            batch.adopt(index, at)
        else:
            hear(at)
    while (wake := batch.next_wake()) is not None:
        hear(wake)
    assert batch.running == batch.context == 0
    return found, adopted


def _note(completion: Completion, event: TokensSampled[int]) -> None:
    for version, tokens in event.parts:
        completion.tokens += [version] * tokens
    if event.is_over:
        completion.finish = event.at


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("curve", CURVES)
def test_fast_forward_equals_step_by_step(curve: DecodeSettings, seed: int) -> None:
    rng = random.Random(seed)
    slots = rng.choice([1, 3, 8])
    expected, adoptions = _workload(rng, 25, drops=seed % 2 == 1)
    looks = [rng.uniform(0, 9) for _ in range(rng.choice([0, 40]))]
    recomputes = seed % 3 == 2
    found, adopted = _fast(DecodeCurve(curve), slots, expected, adoptions, looks, recomputes=recomputes)
    assert adopted == pytest.approx(
        simulate(DecodeCurve(curve), slots, expected, adoptions, recomputes=recomputes), abs=1e-6
    )
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert other.finish == (None if one.finish is None else pytest.approx(one.finish, abs=1e-6))
        # What is interrupted hands over all that it has; of what is aborted nobody wants to know.
        if one.finish is not None or not index % 2:
            assert other.tokens == one.tokens


def test_every_token_belongs_to_the_version_of_its_step() -> None:
    batch = EmulatedBatch(DecodeCurve(DecodeSettings(step_s=1.0, batch_scale=1e9, adopt_s=0.5)), 4, "first")
    batch.arrive(EmulatedSequence(1, 10), 0.0)
    batch.adopt("second", 3.5)
    batch.adopt("third", 3.6)
    batch.adopt("fourth", 9.0)
    (end,) = [event for event in batch.advance(100.0) if isinstance(event, TokensSampled)]
    assert end.parts == (("first", 4), ("third", 4), ("fourth", 2))
    assert end.at == pytest.approx(10 + 3 * 0.5, rel=1e-6)


def test_recomputed_caches_cost_the_prefill_of_all_running_sequences() -> None:
    def end_of(*, recomputes: bool) -> float:
        curve = DecodeCurve(DecodeSettings(table=((1, 1.0),), prefill_s=0.1, prefill_s_per_token=0.01, adopt_s=0.5))
        batch = EmulatedBatch(curve, 2, 0, recomputes=recomputes)
        for prompt_tokens in (5, 3, 40):  # the last one waits, and has no cache yet
            batch.arrive(EmulatedSequence(prompt_tokens, 10), 0.0)
        batch.adopt(1, 4.0)
        return next(event.at for event in batch.advance(1e6) if isinstance(event, WeightsAdopted))

    # At the first boundary behind 4.0 each has 4 tokens of its own, with the two prompts' prefill before them.
    assert end_of(recomputes=False) == pytest.approx(0.28 + 4 + 0.5)
    assert end_of(recomputes=True) == pytest.approx(0.28 + 4 + 0.5 + 2 * 0.1 + (5 + 3 + 2 * 4) * 0.01)


def test_requests_beyond_the_slots_start_in_order_of_arrival() -> None:
    batch = EmulatedBatch(DecodeCurve(DecodeSettings()), 2, 0)
    sequences = [EmulatedSequence(1, 5) for _ in range(5)]
    for sequence in sequences:
        batch.arrive(sequence, 0.0)
    ends = [event for event in batch.advance(1.0) if isinstance(event, TokensSampled)]
    assert [event.sequence for event in ends] == sequences
    assert [len(list(same)) for _, same in groupby(ends, key=lambda event: event.at)] == [2, 2, 1]


def test_a_long_leg_is_one_event() -> None:
    batch = EmulatedBatch(DecodeCurve(DecodeSettings()), 64, 0)
    for _ in range(64):
        batch.arrive(EmulatedSequence(1, 1_000_000), 0.0)
    assert batch.advance(0.0) == []
    assert batch.next_wake() == pytest.approx(20_000.0)


def test_chunks_are_handed_over_on_their_way() -> None:
    batch = EmulatedBatch(DecodeCurve(DecodeSettings(step_s=1.0, batch_scale=1e9, chunk_tokens=4)), 1, 0)
    batch.arrive(EmulatedSequence(1, 10), 0.0)
    events = [event for event in batch.advance(100.0) if isinstance(event, TokensSampled)]
    assert [(event.parts[0][1], round(event.at), event.is_over) for event in events] == [
        (4, 4, False),
        (4, 8, False),
        (2, 10, True),
    ]


def test_samples_of_a_prompt_that_are_admitted_together_are_prefilled_once() -> None:
    def end_of(groups: list[str], slots: int) -> float:
        batch = EmulatedBatch(DecodeCurve(DecodeSettings(table=((1, 1.0),), prefill_s=0.1)), slots, 0)
        for group in groups:
            batch.arrive(EmulatedSequence(5, 2, group=group), 0.0)
        batch.advance(1e6)
        return batch.at

    assert end_of(["a", "a", "b", "b"], 4) == pytest.approx(2 + 0.2)
    assert end_of(["", "", "", ""], 4) == pytest.approx(2 + 0.4)
    assert end_of(["a", "a", "a", "a"], 2) == pytest.approx(4 + 0.2)  # two at a time: the later ones anew
