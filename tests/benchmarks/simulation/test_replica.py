"""The replica in closed form against the emulated engine's batch, and against formulas."""

import random

import pytest

from benchmarks.simulation.replica import NEVER, Completion, Replica
from streamrl.producers.generation.engines.emulated import EmulatedBatch, EmulatedSequence, TokensSampled
from streamrl.schemas.profiles import DecodeCurve, DecodeSettings

CURVE = DecodeCurve(DecodeSettings(step_s=0.01, batch_scale=50.0, context_s_per_token=1e-6, prefill_s_per_token=1e-5))


def run(replica: Replica) -> list[Completion]:
    """Everything that it has, to the end."""
    ended: list[Completion] = []
    replica.settle()
    for _ in range(100_000):
        if replica.next_at == NEVER:
            return ended
        ended += replica.fire()
    raise AssertionError("it does not end")


@pytest.mark.parametrize("kv_tokens", [2_000, 5_000, 1_000_000])
@pytest.mark.parametrize("seed", range(4))
def test_it_ends_every_completion_when_the_emulated_engine_does(seed: int, kv_tokens: int) -> None:
    rng = random.Random(seed)
    lengths = [(rng.randint(5, 200), rng.randint(1, 900)) for _ in range(40)]
    arrivals = sorted(rng.uniform(0, 3) for _ in lengths)
    batch: EmulatedBatch[int] = EmulatedBatch(
        DecodeCurve(CURVE.settings.model_copy(update={"kv_tokens": kv_tokens})), 12, 0
    )
    theirs = [EmulatedSequence(prompt, length) for prompt, length in lengths]
    for sequence, at in zip(theirs, arrivals, strict=True):
        batch.arrive(sequence, at)
    events = batch.advance(1e9)
    expected = {id(one.sequence): one.at for one in events if isinstance(one, TokensSampled) and one.is_over}
    ours = [Completion(prompt, length) for prompt, length in lengths]
    replica = Replica(0, CURVE, 12, kv_tokens, watermark=0.0, headroom=0.0)
    for completion, at in zip(ours, arrivals, strict=True):
        while replica.next_at <= at:
            replica.fire()
        replica.sync(at)
        replica.offer([completion])
        replica.settle()
    run(replica)
    assert [one.ended_at for one in ours] == pytest.approx([expected[id(one)] for one in theirs], abs=0.05)
    assert replica.tokens == sum(length for _, length in lengths)
    assert (replica.context, replica.load, replica.expected_left) == (0, 0, 0)


def test_uniform_lengths_take_whole_rounds() -> None:
    replica = Replica(0, DecodeCurve(DecodeSettings(step_s=0.01, batch_scale=100.0)), 8, 10**9)
    replica.offer(Completion(0, 100) for _ in range(24))
    assert len(run(replica)) == 24
    # Three rounds of 100 steps of 8: 300 × 0.01 × 1.08.
    assert replica.at == pytest.approx(300 * 0.0108)
    assert replica.busy_s == pytest.approx(replica.at)


def test_one_completion_alone_takes_the_sum_of_its_steps() -> None:
    replica = Replica(0, CURVE, 8, 10**6)
    replica.offer([Completion(100, 50)])
    run(replica)
    assert replica.at == pytest.approx(CURVE.prefill_s(100) + CURVE.leg_s(50, 1, 100))


def test_a_completion_that_moves_is_sampled_once() -> None:
    source, target = (Replica(number, CURVE, 8, 10**6) for number in (0, 1))
    moved, stays = Completion(10, 100), Completion(10, 60)
    source.offer([moved, stays])
    source.settle()
    source.sync(0.3)
    target.sync(0.3)
    target.offer(source.take([moved]))
    source.settle()
    assert run(source) == [stays]
    assert run(target) == [moved]
    assert source.tokens + target.tokens == 160
    assert target.prefilled == 10 + moved.length - target.tokens


def test_all_at_once_is_the_same_as_one_after_the_other() -> None:
    rng = random.Random(1)
    lengths = [(rng.randint(5, 200), rng.randint(1, 900), number // 3) for number in range(40)]
    slowly, at_once = (Replica(0, CURVE, 64, 10**6) for _ in range(2))
    ends = []
    for replica in (slowly, at_once):
        ours = [Completion(prompt, length, group) for prompt, length, group in lengths]
        replica.offer(ours)
        ended = run(replica) if replica is slowly else replica.run_out()
        assert set(ended) == set(ours)
        ends.append([one.ended_at for one in ours])
    assert ends[0] == pytest.approx(ends[1])
    for name in ("at", "busy_s", "kv_s", "tokens", "steps", "stalled_s", "load", "expected_left"):
        assert getattr(slowly, name) == pytest.approx(getattr(at_once, name), rel=1e-6), name


def test_completions_beyond_the_cache_run_one_after_the_other() -> None:
    replica = Replica(0, CURVE, 64, 3_000)
    replica.offer(Completion(100, 500) for _ in range(20))
    assert len(replica.run_out()) == 20
    assert replica.tokens >= 20 * 500
