"""Whole runs in virtual time: what holds of every system, and closed forms."""

from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.simulation.outcome import KINDS, Outcome
from benchmarks.simulation.parameters import LAMINAR_SYSTEMS, STREAMRL_SYSTEMS
from benchmarks.simulation.plant import Fault, Lengths, Plant, System, Tools, Workload
from benchmarks.simulation.replica import Completion
from benchmarks.simulation.trainer import Group
from benchmarks.simulation.world import World
from streamrl.schemas.profiles import DecodeCurve, DecodeSettings

CURVE = DecodeCurve(DecodeSettings(step_s=0.01, batch_scale=64.0, context_s_per_token=1e-8, prefill_s_per_token=1e-6))
WORK = Workload(16, 4, Lengths(((20, 0.8), (300, 0.2)), 1500), Lengths(((10, 1.0),), 30), 2000)
PLANT = Plant(4, CURVE, 32, 20_000, 3e-5, 0.1, arrivals_s=(0.1, 0.1, 0.2, 0.2), sync_s=0.3, stall_s=0.05, adopt_s=0.1)
SYSTEMS = {**LAMINAR_SYSTEMS, **{f"streamrl {name}": system for name, system in STREAMRL_SYSTEMS.items()}}


def run(system: System, *, seed: int = 0, steps: int = 6) -> tuple[World, Outcome]:
    world = World(PLANT, WORK, replace(system, repack_every_s=0.5), seed)
    return world, world.run(steps)


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_completion_is_generated_once_and_trained_once_nothing_older_than_the_bound_is_trained(name: str) -> None:
    world = World(PLANT, WORK, replace(SYSTEMS[name], repack_every_s=0.5), 0)
    ended: Counter[int] = Counter()
    trained: list[int] = []
    draw, whole, stepped = world.draw, world._whole, world._stepped
    kept: list[Completion] = []

    def drawn(groups: int) -> list[Group]:
        found = draw(groups)
        kept.extend(one for group in found for one in group.samples)
        return found

    def seen_whole(group: Group) -> None:
        ended[group.position] += 1
        assert all(one.ended_at is not None for one in group.samples)
        whole(group)

    def steps(members: list[Group]) -> None:
        trained.extend(group.position for group in members)
        assert len(members) == WORK.groups
        stepped(members)

    world.draw, world._whole, world._stepped = drawn, seen_whole, steps  # type: ignore[method-assign]
    outcome = world.run(6)
    assert len(trained) == len(set(trained)) == 6 * WORK.groups
    assert set(ended.values()) == {1}
    assert set(trained) <= set(ended)
    sampled = sum(one.length for one in kept if one.ended_at is not None)
    under_way = sum(
        replica.made_of(one) if one in replica.active else one.made
        for replica in world.replicas
        for one in (*replica.active, *replica.waiting)
    )
    assert sum(replica.tokens for replica in world.replicas) == sampled + under_way
    bound = world.loop.staleness_bound
    assert max(outcome.consumed) <= bound
    assert outcome.trained == 6 * WORK.samples


def test_figures_leave_out_the_warm_up() -> None:
    _, outcome = run(SYSTEMS["laminar"], steps=8)
    late = outcome.counted("consumed", 3)
    assert sum(late.values()) == 5 * WORK.samples
    assert sum(outcome.counted("finished", 3).values()) == len(outcome.latencies_after(3)) < len(outcome.latencies)
    # All samples of the first step are of the first weights.
    assert outcome.marks[1].consumed == {0: WORK.samples}


@pytest.mark.parametrize("name", ["verl", "one_step", "laminar", "laminar_without_repack"])
def test_a_completion_that_calls_tools_ends_once_and_waits_for_each(name: str) -> None:
    tools = Tools(2.0, 8, Lengths(((1.9, 1.0),), 2.1))
    work = replace(WORK, tools=tools)
    world = World(PLANT, work, replace(SYSTEMS[name], repack_every_s=0.5), 0)
    draw = world.draw
    kept: list[Completion] = []

    def drawn(groups: int) -> list[Group]:
        found = draw(groups)
        kept.extend(one for group in found for one in group.samples)
        return found

    world.draw = drawn  # type: ignore[method-assign]
    outcome = world.run(4)
    assert outcome.trained == 4 * work.samples
    plain = run(SYSTEMS[name], steps=4)[1]
    assert outcome.step_s(0) > plain.step_s(0)
    # Two seconds a call, of which there are two in the mean.
    took = [one.end() - one.began_at for one in kept if one.ended_at is not None and one.began_at is not None]
    assert max(took) > 3 * 2.0


def test_every_slot_is_looked_at_and_lost_for_one_reason() -> None:
    system = replace(SYSTEMS["streamrl_ranker_repack"], look_s=0.5, max_staleness=1)
    world, outcome = run(system, steps=8)
    counts = outcome.counted("slots", 2)
    assert sum(counts[kind] for kind in KINDS) == counts["looks"] * PLANT.replicas * world.view.told_slots
    # One step of staleness is what holds back so many replicas.
    assert counts["not_admitted"] > counts["free"]


def test_completions_of_a_failed_replica_continue_and_end_once() -> None:
    work = replace(WORK, fault=Fault(2, 4.0, 6.0, (4.0, 10.0)))
    world = World(PLANT, work, replace(SYSTEMS["laminar"], repack_every_s=0.5), 0)
    outcome = world.run(8)
    usual = run(SYSTEMS["laminar"], steps=8)[1]
    assert outcome.trained == 8 * work.samples
    assert len(outcome.probes) == 2
    assert outcome.marks[-1].busy_s < usual.marks[-1].busy_s - 5.0


@pytest.mark.parametrize("name", ["laminar", "streamrl_ranker_repack", "streamrl async"])
def test_a_run_is_a_function_of_its_seed(name: str) -> None:
    first, again, other = (run(SYSTEMS[name], seed=seed, steps=4)[1] for seed in (3, 3, 4))
    assert [mark.at for mark in first.marks] == [mark.at for mark in again.marks]
    assert first.events == again.events
    assert [mark.at for mark in first.marks] != [mark.at for mark in other.marks]


def test_uniform_lengths_make_a_step_of_its_parts() -> None:
    work = Workload(16, 4, Lengths(((99.6, 1.0),), 100.4), Lengths(((10, 1.0),), 10.1), 2000)
    curve = DecodeCurve(DecodeSettings(step_s=0.01, batch_scale=64.0))
    plant = Plant(4, curve, 32, 10**9, 1e-4, 0.5, sync_s=0.3)
    outcome = World(plant, work, System("", "synchronous", "plan"), 0).run(4)
    # 64 completions on 4 replicas: 16 at once, 100 steps; then 64 × 110 tokens trained, and weights synchronised.
    generation_s, training_s = 100 * 0.01 * (1 + 16 / 64), 64 * 110 * 1e-4 + 0.5
    assert outcome.step_s(1) == pytest.approx(generation_s + training_s + 0.3)
    one_step = World(plant, work, System("", "one_step_async", "plan"), 0).run(6)
    assert one_step.step_s(2) == pytest.approx(max(generation_s + 0.3, training_s), rel=0.3)


def test_one_replica_samples_a_batch_as_fast_as_its_curve_allows() -> None:
    plant = replace(PLANT, replicas=1, train_s_per_token=0.0, train_s_per_step=0.0, arrivals_s=(), stall_s=0.0)
    system = replace(SYSTEMS["streamrl_ranker_repack"], repack=False)
    outcome = World(replace(plant, adopt_s=0.0), WORK, system, 0).run(8)
    assert outcome.share("busy_s", 2) == pytest.approx(1.0, abs=0.02)


def test_repack_moves_tails_and_frees_replicas() -> None:
    with_repack = run(SYSTEMS["laminar"])[1]
    assert with_repack.marks[-1].moves > 0
    assert with_repack.marks[-1].released > 0
    assert run(SYSTEMS["laminar_without_repack"])[1].marks[-1].moves == 0


def test_an_event_is_no_token() -> None:
    _, outcome = run(SYSTEMS["laminar_without_repack"], steps=8)
    # A completion's end, what gave up its cache, weights and steps; not the hundreds of tokens of each.
    assert outcome.events < 4 * outcome.generated
