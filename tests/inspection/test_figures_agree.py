"""Invariant one_meaning_one_name_one_value: all that tells of a run tells the same, looked at in one instant."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from streamrl.bus.history import BusHistory
from streamrl.bus.port import Record
from streamrl.consumers.training.metrics import append_metrics
from streamrl.deploy.local.run_store import stored_runs
from streamrl.deploy.local.watching import plain_line
from streamrl.inspection.dashboard.updates import UpdateStream
from streamrl.inspection.diagnostics.lag import lag_line
from streamrl.inspection.diagnostics.status import RunStatus, status_json, status_lines
from streamrl.inspection.report.figures import figures_of
from streamrl.inspection.report.headline import headline_of, tiles_of
from streamrl.inspection.report.record import RunRecord, read_rows
from streamrl.inspection.report.summary import build_summary, summary_lines
from streamrl.inspection.terminal.command import line_of, object_of
from streamrl.observability.metrics.families import Meters
from streamrl.observability.metrics.metering import TrainerMeter
from streamrl.observability.metrics.settings import TrackingSettings
from streamrl.observability.metrics.tracking import Tracker
from streamrl.observability.run_state.feed import WHOLE_RUN, ends_by_bucket
from streamrl.observability.run_state.figures import LIVE, live_figures
from streamrl.observability.run_state.snapshot import health
from streamrl.observability.run_state.state import RunState
from streamrl.policies.role_attaching import instances_on
from streamrl.schemas.control import RunFinished
from streamrl.schemas.reports import StepReport
from streamrl.schemas.topics import HEARTBEATS, SKIPS, STEPS, TRAJECTORIES
from tests.inspection.terminal.made_up_state import RUN, MadeUpState
from tests.observability.run_state.made_up_run import SHARDS

SECONDS = 75.0


class GivenMetrics:
    """What a tracker's library would be given."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}

    def write(self, _step: int, _at: float, metrics: dict[str, float]) -> None:
        self.last = dict(metrics)

    def close(self) -> None:
        """Nothing to close."""


async def records_of(run: MadeUpState, *topics: str) -> list[Record]:
    history = BusHistory(run.bus)
    found = [record for topic in topics async for record in history.records(f"{RUN}.{topic}")]
    return sorted(found, key=lambda record: record.timestamp)


async def test_one_meaning_one_name_one_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = MadeUpState(SECONDS)
    state, now = run.state, run.now
    ends = {tp: held.end for tp, held in (await BusHistory(run.bus).extents(f"{RUN}.{TRAJECTORIES.name}")).items()}
    state.trajectories.ends = ends_by_bucket(ends, SHARDS)
    told = live_figures(state, now)
    assert set(told) == set(LIVE)

    # The truth, counted by hand.
    reports = [message for r in await records_of(run, STEPS.name) if isinstance(message := r.message(), StepReport)]
    newest, trained = reports[-1].metrics, sum(len(each.trained_refs) for each in reports)
    skipped = len(await records_of(run, SKIPS.name))
    assert skipped > 0
    assert told["lag"] == sum(ends.values()) - trained - skipped
    assert (told["step"], told["skipped"]) == (reports[-1].step, skipped)
    assert told["time_left_s"] == pytest.approx(
        (900 - reports[-1].step) * 60 / float(told["steps_per_min"] or 0), abs=1
    )
    # In a steady run all that is ordered is sampled, and all that is sampled trained.
    assert told["ordered_per_s"] == pytest.approx(told["sampled_per_s"], rel=0.3)
    assert told["trajectories_per_s"] == pytest.approx(told["sampled_per_s"], rel=0.3)

    # `top`, the page and `status`: under the same names.
    views = {
        "top --json": object_of(state, now, 0)["loop"],
        "page": json.loads((await anext(UpdateStream(state, clock=lambda: now).updates(_never())))[6:])["loop"],
    }
    looking = RunState(RUN)
    looking.observe_records(await records_of(run, STEPS.name, SKIPS.name, HEARTBEATS.name))
    looking.trajectories.ends = state.trajectories.ends
    status = RunStatus("b:1", now, looking)
    views["status --json"] = status_json(status)
    for view, shown in views.items():
        assert {name: shown[name] for name in LIVE if name in shown} == {n: told[n] for n in LIVE if n in shown}, view
        assert set(LIVE) - set(shown) <= {"sampled_per_s", "weights_per_min"}, view
        assert shown["skipped_by_reason"] == state.skipped, view

    # `algorithms status`, of the run's own trainer.
    own = (await instances_on(BusHistory(run.bus), RUN, {}))[0]
    assert (own.step, own.reward, own.age, own.lag) == tuple(
        told[name] for name in ("step", "reward", "staleness_mean", "lag")
    )

    # The run's own state, which reads no trajectory, and what people read.
    whole = RunState(RUN)
    whole.observe_records(await records_of(run, *(topic.name for topic in WHOLE_RUN)))
    whole.trajectories.ends = state.trajectories.ends
    rate, speed = float(told["trajectories_per_s"] or 0), told["sampled_tokens_per_s"]
    line, top_line, lines = plain_line(whole, 900, now), line_of(state, now), "\n".join(status_lines(status))
    buckets = " ".join(f"b{bucket}:{count}" for bucket, count in state.lag.items())
    reward, loss = f"reward {told['reward']:.3f}", f"loss {newest['loss']:.3g}"
    for part in (f"step {told['step']}/900", reward, loss, f"{rate:.0f} traj/s", f"lag {told['lag']}"):
        assert part in line, part
    assert (
        object_of(state, now, 0)["loop"]["metrics"]["loss"] == status_json(status)["metrics"]["loss"] == newest["loss"]
    )
    for part in (f"step {told['step']}/900", f"lag {buckets}"):
        assert part in top_line
    assert f"step      {told['step']} of 900" in lines
    assert lag_line(state.lag).removeprefix("lag ") in lines
    assert f"{speed:,} tokens/s" in lines
    assert re.search(rf"{rate:.3g} trajectories/s", lines)

    # Metrics and trackers: of the newest step, which is what displays call reward and staleness.
    meter = TrainerMeter(Meters(RUN))
    tracker, given = Tracker(run.bus, RUN, TrackingSettings(to=("tensorboard",)), tmp_path, {}), GivenMetrics()
    monkeypatch.setattr("streamrl.observability.metrics.tracking.open_writer", lambda *_: given)
    (tmp_path / "tensorboard").mkdir()
    tracker.open()
    for record in await records_of(run, STEPS.name, SKIPS.name):
        meter.reported(record.message())
        tracker.write([record])
    value = meter.meters.registry.get_sample_value
    labels = {"run": RUN, "algorithm": "grpo"}
    assert value("streamrl_trained_trajectories_total", labels) == trained
    assert value("streamrl_trainer_steps_total", labels) == told["step"]
    assert value("streamrl_reward_mean", labels) == told["reward"] == given.last["reward"]
    assert value("streamrl_staleness_mean_versions", labels) == told["staleness_mean"] == given.last["off_policy/mean"]
    assert value("streamrl_staleness_max_versions", labels) == told["staleness_max"] == given.last["off_policy/max"]
    rows = {
        reason: value("streamrl_skipped_trajectories_total", {**labels, "reason": reason}) for reason in state.skipped
    }
    assert rows == state.skipped
    behind = [value("streamrl_unfinished_trajectories", {**labels, "bucket": str(bucket)}) for bucket in state.lag]
    assert sum(found or 0.0 for found in behind) == sum(
        count for name, count in newest.items() if name.startswith("kafka/lag/")
    )

    # Summary and report: over all steps, from the topics and from the trainer's file.
    for report in reports:
        append_metrics(tmp_path / "metrics.jsonl", report.step, report.sent_at, report.metrics)
    summary = build_summary(
        whole, engine="e", seed=0, run_seconds=SECONDS, resumed_from=0, before={}, after={}, restarts=0
    )
    written = RunRecord(RUN, tmp_path, read_rows(tmp_path / "metrics.jsonl"), summary)
    report_figures = {figure.key: figure.value for figure in figures_of(written)}
    assert summary["trajectories"] == trained
    assert summary["steps"] == told["step"]
    assert summary["skipped"] == state.skipped
    shared = {
        "steps", "step_seconds", "trajectories", "trajectories_per_s", "tokens_per_s", "staleness_mean",
        "staleness_max", "trainer_wait_share", "reward_first", "reward_last",
    }  # fmt: skip
    assert shared <= summary.keys() & report_figures.keys()
    for name in sorted(shared):
        assert report_figures[name] == pytest.approx(summary[name], rel=2e-3), name

    # The headline and the tiles, as people read them: a reward says of which steps it is the mean.
    first, last = summary["reward_first"], summary["reward_last"]
    headline, tiles = headline_of(written), tiles_of(written)
    assert (headline.before, headline.after) == (f"{first:.3f}", f"{last:.3f}")
    assert f"reward: {first:.3f} → {last:.3f} (first and last {summary['reward_steps']} steps)" in summary_lines(
        summary
    )
    assert [(tile.label, tile.value) for tile in tiles[1:4]] == [
        (f"reward, last {summary['reward_steps']} steps", f"{last:.3f}"),
        ("optimizer steps", f"{told['step']}"),
        ("trajectories/s", f"{summary['trajectories_per_s']:.3g}"),
    ]
    assert tiles[5].note.startswith(f"{told['skipped']:,} trajectories")

    # `runs ls`, from the files: the reward of its step, and finished when the others say so.
    (tmp_path / "config.resolved.toml").write_text("[training]\nmax_steps = 900\n")
    stored = next(each for each in stored_runs(tmp_path.parent) if each.name == tmp_path.name)
    assert (stored.step, stored.reward, stored.state) == (told["step"], told["reward"], "stopped")
    (tmp_path / "config.resolved.toml").write_text(f"[training]\nmax_steps = {told['step']}\n")
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    whole.observe_message(RunFinished(sequence=9, sent_at=now, step=reports[-1].step))
    stored = next(each for each in stored_runs(tmp_path.parent) if each.name == tmp_path.name)
    assert stored.state == health(whole, now) == "finished"


def _never() -> asyncio.Event:
    return asyncio.Event()


def test_the_docs_say_what_each_figure_means() -> None:
    page = (Path(__file__).parents[2] / "docs" / "run-figures.md").read_text()
    for name, figure in LIVE.items():
        assert f"| `{name}` | {figure.unit or '–'} | {figure.meaning} |" in page, name
