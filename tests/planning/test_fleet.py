"""The real dispatcher and workers in virtual time, where workers differ in speed or have little cache."""

import json
import random
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from streamrl.planning.simulation import SimulatedPipeline, SimulatedRun
from streamrl.producers.dispatch.progress import Progress, _WorkerBatch
from streamrl.producers.generation.engines.emulated import EmulatedBatch, EmulatedEngine
from streamrl.schemas.profiles import DecodeCurve
from streamrl.settings.loading import validated
from streamrl.settings.tree import Settings

SLOTS, GROUPS = 16, 96


def _settings(folder: Path, *, steps: int, workers: int, decode: Mapping[str, Any] | None = None) -> Settings:
    rng = random.Random(1)
    lengths = [min(2000, round(300 * 2.0 ** rng.gauss(0, 1.2)) + 1) for _ in range(steps * GROUPS)]
    rows = [json.dumps({"prompt": "twenty characters ..", "length": length}) for length in lengths]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    tree: dict[str, Any] = {
        "run": {"name": "fleet", "directory": str(folder), "workers": workers},
        "data": {"path": str(folder / "prompts.jsonl")},
        "loop": {
            "groups_per_step": GROUPS,
            "num_generations": 1,
            "mode": "synchronous",
            "max_completion_length": 2000,
        },
        "lengths": {"predictor": "trace"},
        "algorithm": {"dynamic_sampling": False},
        "generation": {"engine": "emulated", "max_num_seqs": SLOTS},
        "training": {"backend": "emulated", "max_steps": steps},
        "emulation": {
            "time_scale": 20,
            "decode": dict(decode or {}),
            "lengths": {"source": "column", "prompt_characters_per_token": 1},
        },
    }
    return validated(tree)


def _generation_s(run: SimulatedRun, skipped: int) -> float:
    """Mean seconds between steps after the first ones; training takes next to nothing."""
    at = [mark.report.sent_at for mark in run.steps]
    return fmean(end - start for start, end in list(pairwise(at))[skipped:])


def test_each_workers_own_speed_is_learnt_and_pays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _settings(tmp_path, steps=6, workers=3)
    learnt: dict[str, float] = {}
    plain = _WorkerBatch.learn

    def noted(self: _WorkerBatch, speed: float, weight: float) -> None:
        plain(self, speed, weight)
        learnt[str(id(self))] = self.speed

    def simulated() -> float:
        return _generation_s(SimulatedPipeline(settings, worker_speeds=(1.0, 1.0, 0.5)).run(), 2)

    with monkeypatch.context() as patch:
        patch.setattr(_WorkerBatch, "learn", noted)
        own = simulated()
    assert sorted(learnt.values()) == pytest.approx([0.5, 1.0, 1.0], rel=0.1)

    def of_fleet(self: Progress, worker_id: str) -> DecodeCurve:
        return self._measured(worker_id).times(1 / self.speed)

    monkeypatch.setattr(Progress, "curve_of", of_fleet)
    assert own < 0.9 * simulated()


@pytest.mark.parametrize("mode", ["synchronous", "stream"])
def test_a_plan_that_knows_the_cache_is_faster_where_dropped_work_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    decode = {"kv_tokens": 4000, "prefill_s_per_token": 0.001}
    settings = _settings(tmp_path, steps=4, workers=2, decode=decode)
    settings = settings.model_copy(update={"loop": settings.loop.model_copy(update={"mode": mode})})
    dropped: list[int] = []
    plain = EmulatedBatch._make_room

    def counted(self: EmulatedBatch[Any], events: Any) -> None:
        before = self.preempted
        plain(self, events)
        dropped.append(self.preempted - before)

    monkeypatch.setattr(EmulatedBatch, "_make_room", counted)

    def simulated() -> tuple[float, int]:
        dropped.clear()
        seconds = _generation_s(SimulatedPipeline(settings).run(), 1)
        return seconds, sum(dropped)

    known_s, known = simulated()
    # A heartbeat that does not say, and a curve that does not either.
    monkeypatch.setattr(EmulatedEngine, "kv_tokens", None)
    monkeypatch.setattr("streamrl.settings.tree.decode_curve", lambda settings: DecodeCurve(settings.emulation.decode))
    monkeypatch.setattr(
        "streamrl.planning.simulation.decode_curve",
        lambda settings: DecodeCurve(settings.emulation.decode.model_copy(update={"kv_tokens": None})).times(1 / 20),
    )
    unknown_s, unknown = simulated()
    print(known_s, unknown_s, known, unknown)
    assert known < unknown / 4
    assert known_s < unknown_s
