"""The fit sees no held-out row, finds what made-up rows were made of, and every parameter says where it is from."""

import json
from typing import Any

import pytest

from benchmarks.conditions import RESULTS
from benchmarks.simulation import fitting, papers
from benchmarks.simulation.__main__ import STAGES, finished
from benchmarks.simulation.fitting import Observation, chosen, laminar_observations, streamrl_observations
from benchmarks.simulation.parameters import FILE, arrivals, decode_curve, kv_tokens
from benchmarks.simulation.rows import PARTS, Task, tasks
from benchmarks.simulation.summary import summed_up


def observations() -> list[Observation]:
    stages = json.loads(STAGES.read_text())
    return [*laminar_observations(stages["laminar"]), *streamrl_observations(stages["streamrl"])]


def test_held_out_rows_are_not_in_the_fit() -> None:
    folds = {one.fold for one in observations()}
    assert folds == {f"{row.model} {row.gpus}" for row in papers.LAMINAR if row.model != "72B"} | {
        f"{row.lengths} {row.model}" for row in papers.STREAMRL if row.lengths != "10K"
    }
    every = [task for part in PARTS for task in tasks(part) if isinstance(task, Task)]
    held_out = [task for task in every if task.figure in ("8", "11") and not task.fitted]
    assert all(task.published is None for task in held_out)
    assert {task.gpus for task in held_out if task.model == "72B" and task.paper == "laminar"} == {
        64, 128, 256, 512, 1024,
    }  # fmt: skip


def test_every_configuration_is_a_row() -> None:
    names = [(task.figure, task.model, task.gpus, task.lengths, task.system) for part in PARTS for task in tasks(part)]
    assert len(names) == len(set(names))
    assert sum(name[0] == "11" and name[4] in papers.SYSTEMS for name in names) == 15 * 5
    assert sum(name[0] == "8" and name[4] in papers.STREAMRL_SYSTEMS for name in names) == 9 * 4


def test_the_form_that_made_the_rows_is_chosen() -> None:
    true = {"cost": 3.0, "fixed": 0.5}

    def made(gpus: int) -> Observation:
        def predict(values: fitting.Values) -> float:
            return float(values["cost"] / gpus ** values.get("power", 1.0) + values.get("fixed", 0.0))

        return Observation(str(gpus), str(gpus), predict(true), predict)

    terms = {"scaling": {"1 / G": {}, "1 / G^q": {"power": 0.9}, "1 / G + c": {"fixed": 0.1}}}
    values, forms, tried = chosen([made(gpus) for gpus in (1, 2, 4, 8, 16)], {"cost": 1.0}, terms)
    assert forms == {"scaling": "1 / G + c"}
    assert values == pytest.approx(true, rel=0.01)
    assert len(tried) == 3


def test_every_parameter_says_where_it_is_from() -> None:
    file = json.loads(FILE.read_text())
    assert all(entry["source"] for entry in file["known"].values())
    assert set(file["fitted"]) == {"laminar", "streamrl", "details"}
    for paper, entries in file["fitted"].items():
        assert entries, paper
        assert all(entry["fitted"] and entry["form"] for entry in entries.values())


def test_relays_take_what_is_published() -> None:
    for model, seconds in papers.BROADCAST.items():
        for machines, published in seconds.items():
            assert max(arrivals(model, machines, 8)) == pytest.approx(published, rel=0.2)


def test_decode_steps_are_those_of_the_figure() -> None:
    # At 4,096 tokens of context each: 29.6 ms of 256 completions of 7B, 25.8 ms of 128 of 32B on 4 GPUs.
    assert decode_curve("7B", 1).leg_s(1, 256, 256 * 4096) == pytest.approx(0.0296, rel=0.02)
    assert decode_curve("32B", 4).leg_s(1, 128, 128 * 4096) == pytest.approx(0.0258, rel=0.05)
    assert kv_tokens("32B", 4) == pytest.approx(850_000, rel=0.01)


def test_rows_far_off_are_named() -> None:
    def row(system: str, predicted: float, published: float) -> dict[str, Any]:
        place = {"paper": "laminar", "figure": "11", "model": "7B", "gpus": 16, "lengths": "", "cpu_s": 1.0}
        return {**place, "system": system, "predicted": predicted, "published": published, "fitted": True}

    rows = [row("laminar", 30.0, 20.0), row("verl", 10.0, 10.0), row("areal", 15.0, 10.0)]
    summary = finished({"rows": rows})["summary"]
    assert [one["system"] for one in summary["far_off"]] == ["laminar / verl", "laminar", "areal"]
    assert summary["laminar"]["ratios"]["median"] == pytest.approx(0.25)


def test_everything_that_is_far_off_has_a_reason() -> None:
    rows = json.loads((RESULTS / "simulation.json").read_text())["rows"]
    assert [one for one in summed_up(rows)["far_off"] if one["reason"] == "not known"] == []
