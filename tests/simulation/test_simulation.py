"""Seeds of every scenario keep every promise; and a world in which a safeguard is missing is found out."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from streamrl.bus.port import Start
from streamrl.consumers.ingest.filters import TrajectoryFilter
from streamrl.consumers.ingest.frontier import PartitionFrontier
from streamrl.consumers.ingest.ledger import FinishedGroups, Ledger
from streamrl.consumers.ingest.rejections import RejectionWriter
from streamrl.consumers.training import identity
from streamrl.consumers.training.checkpoints.catalogue import Lineage
from streamrl.consumers.training.checkpoints.storage import Slot
from streamrl.consumers.training.session import TrainerSession
from streamrl.coordinator.state import VersionLedger
from streamrl.policies.arms import SplitKeeper
from streamrl.producers.dispatch.recovery import _TrainerRecords
from streamrl.producers.dispatch.state import DispatchState
from streamrl.producers.generation import partials
from streamrl.producers.generation.rollout import SampledCompletion
from streamrl.producers.generation.worker import OrderExecutor
from streamrl.schemas.control import RunIdentity
from streamrl.schemas.reports import SkipRecord, StepReport
from streamrl.schemas.trajectories import PartialTrajectory, WorkOrder
from streamrl.weights.adopt import WeightsAdopter
from tests.simulation.bus.reading import SimSubscription
from tests.simulation.bus.sim_bus import SimBus
from tests.simulation.parts import checkpoints
from tests.simulation.parts.sampling import SamplingFaults
from tests.simulation.run import run_seed, run_setup, simulate
from tests.simulation.worlds.scenarios import SCENARIOS, Setup, draw_setup

MOST_TRIED = 60


def hundreds(seed: int) -> Setup:
    """A run of the scenario "thousands" with a twentieth of its groups, and harm fifteen times as often."""
    return replace(draw_setup(seed, "thousands"), sampling=SamplingFaults(abort=0.8), harm_every_s=0.1)


def test_every_scenario_does_the_harm_it_is_named_for_and_every_promise_is_kept() -> None:
    """A seed of each at least, and until each harm was done; `make chaos` runs thousands."""
    # Each act has a note of its own in the trace.
    notes = {
        "kill_trainer": {"kill"},
        "zombie_trainer": {"freeze", "thaw"},
        "restore_checkpoint": {"restore"},
        "lose_directory": {"lose directory"},
        "second_holder": {"second holder"},
        "split": {"sampled by an arm"},
    }
    for name, scenario in SCENARIOS.items():
        wanted = {note for act, found in notes.items() if getattr(scenario.harm, act) >= 0.5 for note in found}
        if scenario.rates.ack_lost:
            wanted.add("lost answers")
        for seed in range(5, 20):
            outcome = run_setup(hundreds(seed) if name == "thousands" else draw_setup(seed, name), keep_trace=True)
            assert outcome.problems == (), (name, seed)
            kinds = {kind for _, kind, _, _ in outcome.trace}
            kinds |= {"sampled by an arm"} if outcome.of_arms else set()
            wanted -= kinds | ({"lost answers"} if {"unknown", "late", "refused"} & kinds else set())
            if not wanted:
                break
        assert not wanted, name


@pytest.mark.parametrize("seed", [94, 179, 324])
def test_processes_that_left_at_an_undone_end_come_back_and_the_run_ends_well(seed: int) -> None:
    """At several moments after the end: before all roles have heard of it, and after."""
    outcome = run_seed(seed, "restores", keep_trace=True)
    assert any(kind == "end undone" for _, kind, _, _ in outcome.trace), "another seed shows it now"
    assert outcome.problems == ()


@pytest.mark.processes
def test_seeds_run_side_by_side_add_up() -> None:
    sums = simulate(6, jobs=2)
    assert sums["failures"] == []
    assert (sums["lost"], sums["trained_twice"], sums["audit_failures"]) == (0, 0, 0)


@pytest.mark.parametrize("scenario", ["everything", "zombie-trainers"])
def test_a_seed_always_goes_the_same_way(scenario: str) -> None:
    first, second = (run_seed(3, scenario, keep_trace=True) for _ in range(2))
    assert first.trace_hash == second.trace_hash
    assert first.trace_hash != run_seed(4, scenario, keep_trace=True).trace_hash


def test_with_places_kept_nothing_grows_too_old_in_whatever_order_it_is_taken() -> None:
    """Without faults, and a trainer that others run ahead of: by admission and the places, not by the age check."""
    shape: dict[str, Any] = {
        "max_staleness": 2,
        "weight_sync_steps": 1,
        "groups_per_step": 2,
        "max_steps": 6,
        "workers": 3,
        "slots": 8,
    }
    drawn = replace(draw_setup(0, "calm"), **shape, token_s=0.02, compute_s=1.0, num_generations=2, fixed_batches=False)
    stale, ways = {}, set()
    for order in (("oldest", "train"), ("freshest", "train"), ("absolute_advantage", "train"), ("freshest", "skip")):
        outcome = run_setup(replace(drawn, takes=order[0], passed_over=order[1]), keep_trace=True)
        assert outcome.problems == ()
        stale[order] = outcome.stale
        ways.add(outcome.trace_hash)
    assert len(ways) == len(stale), "each order is another run"
    assert stale.pop(("freshest", "skip")) > 0
    assert set(stale.values()) == {0}


def test_a_window_that_does_not_look_at_ages_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrajectoryFilter, "outdated", lambda self, group: None)
    assert "staleness" in rules_broken("sampling", {"staleness"})


@pytest.mark.processes
def test_a_seed_goes_the_same_way_in_another_process_with_other_hashes() -> None:
    script = "from tests.simulation.run import run_seed; print(run_seed(3, 'everything', keep_trace=True).trace_hash)"
    hashes = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "3")
    }
    assert len(hashes) == 1


def rules_broken(scenario: str, wanted: Iterable[str], first: int = 0, most: int = MOST_TRIED) -> set[str]:
    """Rules that seeds of a scenario break, from ``first`` on, up to the first that breaks one of those wanted."""
    found: set[str] = set()
    for seed in range(first, first + most):
        found |= {problem.rule for problem in run_seed(seed, scenario).problems}
        if found & set(wanted):
            break
    return found


def test_without_dedupe_trajectories_are_found_in_the_model_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "has_sample", lambda self, group_id, index: False)
    monkeypatch.setattr(Ledger, "is_closed", lambda self, group_id: False)
    assert "duplicate effect" in rules_broken("poison", {"duplicate effect"}, first=39)


def test_a_frontier_that_runs_ahead_of_the_step_is_found_to_lose_records(monkeypatch: pytest.MonkeyPatch) -> None:
    read: Callable[[PartitionFrontier, int], None] = PartitionFrontier.mark_read

    def finish_at_once(self: PartitionFrontier, offset: int) -> None:
        read(self, offset)
        self.done.add(offset)
        self._advance()

    monkeypatch.setattr(PartitionFrontier, "mark_read", finish_at_once)
    assert "lost" in rules_broken("trainer-crashes", {"lost"})


def test_offsets_trusted_from_commits_are_found_to_lose_records(monkeypatch: pytest.MonkeyPatch) -> None:
    subscribe = SimBus.subscribe

    async def from_commits(self: SimBus, topics: Any, *, start: Start = "earliest", **how: Any) -> SimSubscription:
        is_reader = how["client_id"].endswith("-reader")
        committed = {
            tp: offset for (_, tp), offset in self.broker.committed.items() if is_reader and tp.topic in topics
        }
        return await subscribe(self, topics, start=committed or start, **how)

    monkeypatch.setattr(SimBus, "subscribe", from_commits)
    assert rules_broken("trainer-crashes", {"lost"}, first=3) & {"lost", "contents", "ledger"}


def test_without_the_lineage_check_zombies_are_found_in_the_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lineage, "check", lambda self: None)
    wanted = {"lineage", "contents"}
    # The one that comes back must reach a step of its own before it reads that it was superseded: 4 seeds in 200.
    assert rules_broken("zombie-trainers", wanted, first=288, most=200) & wanted


def test_rows_that_are_not_sent_again_are_found_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    landed = RejectionWriter._on_sent

    def forget(self: RejectionWriter, row: Any, future: Any) -> None:
        landed(self, row, future)
        self._outbox.clear()

    monkeypatch.setattr(RejectionWriter, "_on_sent", forget)
    assert "lost" in rules_broken("poison", {"lost"}, first=1)


def test_ids_that_a_count_pushes_out_are_found_trained_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """In worlds of so many groups that a window of forty is full long before the steps make repeats too old."""
    order: list[str] = []

    def finish_in_window(self: FinishedGroups, group_id: str, samples: Iterable[int], wanted: int) -> None:
        order.append(group_id)
        self._partial[group_id] = frozenset(samples)
        for old in order[:-40]:
            self._partial.pop(old, None)
        del order[:-40]

    monkeypatch.setattr(FinishedGroups, "finish", finish_in_window)
    assert "duplicate effect" in {found.rule for found in run_setup(hundreds(1)).problems}


def test_an_announcement_before_its_checkpoint_is_found_to_undo_an_end_that_was_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the last step: everybody hears that the run has ended, and the trainer that crashed goes on behind that."""
    checkpoint = TrainerSession.checkpoint

    async def announce_first(self: TrainerSession) -> None:
        if self.is_checkpoint_due and self.report is not None:
            await self.announce(self.report)
            await self.announcements.settled()
        await checkpoint(self)

    monkeypatch.setattr(TrainerSession, "checkpoint", announce_first)
    assert "end" in rules_broken("trainer-crashes", {"end"}, first=33)


def test_tokens_of_two_processes_that_are_joined_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def join_all(chunks: Iterable[PartialTrajectory], trajectory_id: str) -> SampledCompletion:
        return partials._joined([chunk for chunk in chunks if chunk.trajectory_id == trajectory_id])

    monkeypatch.setattr(partials, "longest_prefix", join_all)
    assert "parts" in rules_broken("partial-trajectories", {"parts"}, first=65)


def test_a_restart_by_an_older_order_is_found_to_sample_tokens_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    restore = DispatchState.restore

    def by_the_last(self: DispatchState, order: WorkOrder, now: float) -> None:
        if (flight := self.flights.get(order.group_id)) is not None:
            flight.order = flight.order.replace(attempt=0)
        restore(self, order, now)

    monkeypatch.setattr(DispatchState, "restore", by_the_last)
    assert "sampled twice" in rules_broken("repack-slow-rewards", {"sampled twice"}, first=28)


def test_a_worker_that_does_not_wait_until_it_is_idle_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(self: OrderExecutor) -> None:
        return

    monkeypatch.setattr(OrderExecutor, "until_idle", at_once)
    assert "adoption" in rules_broken("idle", {"adoption"})


def test_another_policy_s_weights_that_are_taken_at_once_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightsAdopter, "_waits_for_idle", lambda self, ready: self.only_idle)
    assert "policy" in rules_broken("splits", {"policy"})


def test_an_arm_whose_steps_are_read_once_and_never_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    observe = SplitKeeper._ledger_of

    def dropped(self: SplitKeeper, arm: str) -> VersionLedger:
        ledger = observe(self, arm)
        return VersionLedger(announced=ledger.announced) if ledger.announced else ledger

    monkeypatch.setattr(SplitKeeper, "_ledger_of", dropped)
    assert "arms" in rules_broken("splits", {"arms"})


def test_a_history_that_is_sorted_by_clocks_is_found_to_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_time(self: _TrainerRecords) -> Iterator[StepReport | SkipRecord]:
        messages: list[StepReport | SkipRecord] = [*self.reports, *self.rows]
        return iter(sorted(messages, key=lambda message: message.sent_at))

    monkeypatch.setattr(_TrainerRecords, "in_causal_order", by_time)
    assert "liveness" in rules_broken("clocks", {"liveness"}, first=2)


def test_an_adopted_run_that_forgets_its_earlier_life_is_found_to_train_its_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adopted = identity._adopted

    def forget(start: identity.Start, own: str | None) -> RunIdentity:
        return adopted(start, own).replace(orphans_through=0)

    monkeypatch.setattr(identity, "_adopted", forget)
    assert "orphan" in rules_broken("directories", {"orphan"})


def test_a_restore_that_the_next_start_does_not_heed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "resumable", lambda entries, rollback: list(entries))
    assert "restore" in rules_broken("restores", {"restore"})


FOUND: list[tuple[str, int, dict[str, Any]]] = [
    ("restores", 20, {}),
    ("zombie-trainers", 122, {"by_lineage": True, "checkpoint_every": 3}),
    ("splits-and-promotions", 33, {}),
    ("partial-trajectories", 139, {}),
]


@pytest.mark.parametrize(("scenario", "seed", "changes"), FOUND)
def test_seeds_that_found_something_find_nothing_any_more(scenario: str, seed: int, changes: dict[str, Any]) -> None:
    """In these scenarios seeds found: groups counted as under way behind a restore that went forward again to what an
    earlier one had undone; a manifest that came late, behind files that a successor had cleared (122 finds it still,
    where the safeguard is missing: see below); a last step never reported by an instance that took one refused request
    for the end of the broker; a worker that was stopped before its first heartbeat and waited for ever.

    Any change of what the loop asks a broker moves what a seed draws, so the others are seeds like any.
    """
    assert run_setup(replace(draw_setup(seed, scenario), **changes)).problems == ()


def test_a_clearing_that_leaves_no_mark_is_found_to_end_in_a_manifest_without_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forget(self: checkpoints.MemoryPlace, is_left: Callable[[Slot], bool]) -> None:
        for name, pieces in self.pieces.items():
            if "manifest" not in pieces and is_left(self.slots_by_name[name]):
                pieces.clear()

    monkeypatch.setattr(checkpoints.MemoryPlace, "_sweep", forget)
    scenario, seed, changes = FOUND[1]
    assert "contents" in {found.rule for found in run_setup(replace(draw_setup(seed, scenario), **changes)).problems}
