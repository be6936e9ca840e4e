"""What the rows come to: errors of ratios on fitted rows, and each row that is far off, with the reason if it is known.

A ratio is between two systems of one configuration, as the papers claim them: each system over the slowest baseline's
engine (verl), and the paper's own system over every other.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.simulation import papers
from benchmarks.simulation.reasons import reason

FAR = 0.30
THROUGHPUTS = {"laminar": "11", "streamrl": "8"}
"""Each paper's figure whose rows were fitted on."""
DISPATCH_TOLERANCE = 0.12
OWN = {"laminar": ("laminar",), "streamrl": ("sync", "async")}
Row = Mapping[str, Any]


def ratios(rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """Of the fitted rows: the paper's own system over each other one of its configuration, predicted and published."""
    rows = [row for row in rows if is_throughput(row)]
    for row in rows:
        if row["system"] not in OWN[row["paper"]]:
            continue
        for other in rows:
            if _place(other) == _place(row) and other["system"] not in ("sync", "async", "laminar"):
                predicted, published = (row[key] / other[key] for key in ("predicted", "published"))
                yield {
                    "paper": row["paper"],
                    "figure": row["figure"],
                    "model": row["model"],
                    "gpus": row["gpus"],
                    "lengths": row["lengths"],
                    "system": f"{row['system']} / {other['system']}",
                    "predicted": predicted,
                    "published": published,
                    "error": predicted / published - 1,
                }


def is_throughput(row: Row) -> bool:
    """Whether it is one that was fitted on."""
    return bool(row["fitted"] and row["published"] and THROUGHPUTS.get(row["paper"]) == row["figure"])


def _place(row: Row) -> tuple[Any, ...]:
    return row["paper"], row["figure"], row["model"], row["gpus"], row["lengths"]


def summed_up(rows: Sequence[Row]) -> dict[str, Any]:
    """Errors over all fitted rows, by paper, and what is not explained."""
    found: dict[str, Any] = {}
    for paper in OWN:
        mine = [one for one in ratios(rows) if one["paper"] == paper]
        own = [row for row in rows if row["paper"] == paper and is_throughput(row)]
        found[paper] = {
            "ratios": _errors([one["error"] for one in mine]),
            "throughputs": _errors([row["predicted"] / row["published"] - 1 for row in own]),
        }
    every = list(ratios(rows))
    found["all"] = {"ratios": _errors([one["error"] for one in every])}
    dispatch = [row for row in rows if (row["paper"], row["figure"]) == ("streamrl", "9")]
    found["dispatch"] = {
        "largest_difference": max((abs(row["predicted"] - row["published"]) for row in dispatch), default=None),
        "tolerance": DISPATCH_TOLERANCE,
    }
    found["far_off"] = [
        {name: one[name] for name in SHOWN} | {"error": error, "reason": reason(one)}
        for one in (*every, *rows)
        if (error := _error(one)) is not None and abs(error) > FAR
    ]
    return found


SHOWN = ("paper", "figure", "model", "gpus", "lengths", "system", "predicted", "published")


def _error(row: Row) -> float | None:
    """Relative; of a difference that may be 0, in units of the largest of its figure (``of``)."""
    if row["published"] is None or row["predicted"] is None:
        return None
    return float(row["predicted"] - row["published"]) / float(row.get("of", row["published"]))


def _errors(errors: Sequence[float]) -> dict[str, float]:
    if not errors:
        return {}
    size = np.abs(errors)
    return {
        "rows": len(errors),
        "median": float(np.median(size)),
        "p90": float(np.quantile(size, 0.9)),
        "worst": float(size.max()),
    }


def derived(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Rows that follow from others: StreamRL's table 3, Laminar's figure 10 and table 1."""
    by_name = {
        (row["figure"], row["model"], row["gpus"], row["lengths"], row["system"]): row
        for row in rows
        if row["figure"] == THROUGHPUTS.get(row["paper"])
    }

    def row(paper: str, figure: str, model: str, gpus: int, system: str, lengths: str = "") -> Any:
        place = {"paper": paper, "figure": figure, "model": model, "gpus": gpus, "lengths": lengths, "system": system}
        return lambda predicted, published, unit, fitted=False: {
            **place, "predicted": predicted, "unit": unit, "published": published, "fitted": fitted,
        }  # fmt: skip

    base = by_name.get(("8", "72B", 128, "20K", "colocation"))
    for system, published in papers.LADDER.items():
        if base and (one := by_name.get(("8", "72B", 128, "20K", system))):
            make = row("streamrl", "table 3", "72B", 128, system, "20K")
            yield make(one["predicted"] / base["predicted"], published, "over colocation")
    if one := by_name.get(("11", "7B", 64, "", "laminar")):
        for steps, published in enumerate(papers.STALENESS):
            shares = one["staleness_at_end"]
            make = row("laminar", "10", "7B", 64, f"staleness {steps}")
            yield make(shares[steps] if steps < len(shares) else 0.0, published, "share of completions, at their end")
    for name, system in (("with", "laminar"), ("without", "laminar_without_repack")):
        if one := by_name.get(("11", "32B", 128, "", system)):
            figures = papers.REPACK[name]
            for key, predicted, unit in (
                ("kv", one["kv"], "share of the cache in use"),
                ("rate", one["sampled_per_s"] / 1000, "thousand tokens sampled/s"),
                ("mean_s", one["latency_mean_s"], "s, mean of completions"),
                ("max_s", one["latency_max_s"], "s, longest completion"),
            ):
                make = row("laminar", "table 1", "32B", 128, f"{name} repack: {key}")
                yield make(predicted, figures[key], unit, key == "rate")


def errors(summed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The errors as rows of a table."""
    for paper in (*OWN, "all"):
        for what, found in summed[paper].items():
            if found:
                yield {"paper": paper, "what": what, **found}


def scaled(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Ranker and repack beyond the papers."""
    names = ("gpus", "system", "predicted", "share_of_bound", "worst_share_of_bound", "busy", "kv", "stage", "seeds")
    more = ("training", "generating", "slots", "moves_per_step", "bubbles", "trainer_busy")
    for row in rows:
        if row["paper"] == "none":
            shares = row["staleness_trained"]
            yield {
                **{name: row.get(name) for name in (*names, *more)},
                "mean_staleness": sum(steps * share for steps, share in enumerate(shares)),
                "cpu_per_hour": row["cpu_s"] / row["simulated_s"] * 3600,
            }
