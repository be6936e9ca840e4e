"""A run that has ended is shown from its files: no broker is started, and nothing looks as if it went on."""

import json
import time
from pathlib import Path

from streamrl.inspection.dashboard.ended import ended_state
from streamrl.inspection.report.record import read_facts
from streamrl.inspection.source import PastRun, open_run
from streamrl.observability.run_state.snapshot import snapshot
from streamrl.schemas.starts import ChangedValue, RunStart, append_start
from tests.inspection.report.recorded import gather, record_run


async def past_run(path: Path, *, most: float | None = None) -> PastRun:
    recorded = await gather(record_run(path))
    rows = [json.loads(line) for line in recorded.directory.metrics.read_text().splitlines()]
    last = rows[-1]["step"]
    if most is not None:
        rows[-1]["progress/max_steps"] = most
        recorded.directory.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recorded.directory.summary.write_text(json.dumps({"steps": last}))
    changed = (ChangedValue("a.b", "1", "2"),)
    for start in (
        RunStart(at=rows[0]["time"] - 9.0, step=0),
        RunStart(at=rows[3]["time"] - 0.01, step=3, changed=changed),
    ):
        append_start(recorded.directory.starts, start)
    return open_run(path)


def past_ends(past: PastRun) -> dict[int, int]:
    topics = read_facts(past.directory.gathered).topics
    assert topics is not None
    return topics.ends


async def test_an_ended_run_is_shown_from_its_files(tmp_path: Path) -> None:
    past = await past_run(tmp_path / "mine", most=3.0)
    shown = snapshot(ended_state(past), time.time())
    json.dumps(shown, allow_nan=False)
    rows = [json.loads(line) for line in past.directory.metrics.read_text().splitlines()]
    loop, newest = shown["loop"], max(row["step"] for row in rows)
    assert (loop["health"], loop["over"], loop["step"], loop["step_at"]) == ("finished", True, newest, rows[-1]["time"])
    assert loop["reward"] == shown["curves"]["reward"][-1] or abs(loop["reward"] - shown["curves"]["reward"][-1]) < 1e-4
    assert loop["whole"]["trajectories"] > 0
    lanes = {lane["name"]: lane for lane in shown["timeline"]}
    assert {kind for _, _, kind, _ in lanes["trainer"]["stretches"]} <= {"wait", "train", "optimizer", "publish"}
    assert all(lanes[f"worker-{number}"]["stretches"] and lanes[f"worker-{number}"]["marks"] for number in range(3))
    ends = past_ends(past)
    assert loop["lag"] == sum(ends.values()) - sum(rows[-1][f"kafka/finished/bucket_{n}"] for n in range(4)) > 0
    assert shown["staleness"]["counts"]
    assert shown["lengths"]["cells"]
    assert {row["fate"] for row in shown["trajectories"]} == {"left over"}
    assert shown["curves"]["marks"][0][2:] == ["settings", "resumed from step 3; changed: a.b 1 → 2"]
    assert shown["events"][-1][3] == f"the run finished at step {newest}"


async def test_a_run_that_did_not_reach_its_end_is_shown_as_stopped(tmp_path: Path) -> None:
    shown = snapshot(ended_state(await past_run(tmp_path / "mine")), time.time())
    assert (shown["loop"]["health"], shown["loop"]["over"]) == ("stopped", True)
