"""A case's recording as rows: what was measured, against the synchronous mode, the ceiling, and the ideal."""

from dataclasses import asdict

from benchmarks.pipeline.bounds.ideal import ideal_step_s
from benchmarks.pipeline.cases import Case
from benchmarks.pipeline.results import Row
from benchmarks.pipeline.running.figures import figures
from benchmarks.pipeline.running.recording import Recording

GENERATION_CEILING = 1.37


def row_of(case: Case, recording: Recording, *, time_scale: float, kind: str) -> Row:
    """Everything but the ratios to other cases."""
    work = case.workload
    found = figures(recording, warm_up=case.warm_up, steps=case.steps, slots=work.slots, time_scale=time_scale)
    ideal = ideal_step_s(case, recording)
    return {
        "workload": work.name,
        "mode": case.mode,
        "dispatch": case.dispatch,
        "ranker": case.ranker,
        "kind": kind,
        **asdict(found),
        "ideal_step_s": ideal,
        "ratio_to_ideal": ideal / found.step_s,
        "steps": case.steps,
        "time_scale": time_scale,
    }


def with_ratios(rows: list[Row], cases: tuple[Case, ...]) -> list[Row]:
    """The rows with their ratios, as far as the case that they are compared with is among them; and rows of generation
    alone, from the runs in which it is not mixed with training.
    """
    ceilings = {_key(case): case.ceiling for case in cases}
    bases = {row["workload"]: row for row in rows if (row["mode"], row["dispatch"]) == ("synchronous", "round_robin")}
    done = []
    for row in rows:
        base = bases.get(row["workload"])
        ratio = row["trajectories_per_s"] / base["trajectories_per_s"] if base else None
        done.append(_compared(row, ratio, ceilings.get((row["workload"], row["mode"], row["dispatch"], row["ranker"]))))
        if base and row is not base and row["mode"] == "synchronous":
            done.append(_generation_alone(row, base))
    return done


def _key(case: Case) -> tuple[str, str, str, str]:
    return case.workload.name, case.mode, case.dispatch, case.ranker


def _compared(row: Row, ratio: float | None, ceiling: float | None) -> Row:
    bound = ratio / ceiling if ratio is not None and ceiling is not None else None
    return {**row, "ratio_to_synchronous": ratio, "ratio_to_bound": bound, "bound": ceiling}


def _generation_alone(row: Row, base: Row) -> Row:
    alone = {
        name: row[name] for name in ("workload", "dispatch", "ranker", "kind", "generation_s", "steps", "time_scale")
    }
    per_step = row["trajectories_per_s"] * row["step_s"]
    return _compared(
        {**alone, "mode": "generation_alone", "trajectories_per_s": per_step / row["generation_s"]},
        base["generation_s"] / row["generation_s"],
        GENERATION_CEILING if row["workload"] == "a" else None,
    )
