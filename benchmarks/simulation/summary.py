"""What the rows come to: errors of ratios on fitted rows, each row that is far off with the reason if it is known, and
a picture: predicted against published, the fitted rows and the ones that were not.

A ratio is between two systems of one configuration, as the papers claim them: each system over the slowest baseline's
engine (verl), and the paper's own system over every other.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulation import papers
from benchmarks.simulation.papers import IDENTITY

_GROWTH = (
    "from 5K to 20K, where lengths grow alike for all models, the published step of verl grows 3.4-, 2.4- and "
    "2.7-fold (7B, 32B, 72B) and that of ColocationRL 2.7-, 3.3- and 2.8-fold: no term that is the same for all "
    "models does that"
)
_WHOLE = (
    "by Little's law 68.1 thousand tokens/s with 290 s each are 5,970 completions at once, of 1,870 tokens each "
    "in caches that are 82 % full; of figure 17's lengths one that runs has 2,500 in the mean: what is measured "
    "is not said to be from the first token on, nor to count those whose caches were given up"
)
REASONS = {
    ("streamrl", "8", ""): _GROWTH,
    ("streamrl", "2", "generation"): (
        "published generation is 1.4 times as fast on 4 times the GPUs: its workload, which is not stated, must "
        "leave most of the time to few completions; here 1,024 of equal length are sampled"
    ),
    ("streamrl", "2", "training"): "published training is 5.3 times as fast on 4 times the GPUs; here 4 times at most",
    ("streamrl", "10", ""): (
        "32B trains as fast on 24 GPUs as on 32 in the figure, and 72B 1.4 times as long on 48 as on 64; and GPUs"
        " that sample gain here less, since a step waits for its longest completions"
    ),
    ("streamrl", "11", "step"): (
        "published generation falls behind by three times as much a step while lengths are said to grow evenly"
    ),
    ("streamrl", "11", "GPUs"): "generation falls behind more slowly here, see the steps",
    ("streamrl", "section 7.3", ""): (
        "145 GB at 80 Gbps take 14.5 s: less than 10 s are fewer bytes or more links than the paper says"
    ),
    ("laminar", "9", ""): (
        "of the figure's 512 completions 495 still run when they have 1,700 tokens each and the cache is full; of"
        " figure 17's lengths a fifth is shorter than that: it is of longer completions, and so many more had to "
        "wait"
    ),
    ("laminar", "10", "staleness"): (
        "the figure's first half hour is .351, .416, .223 and .010, as it is here; what makes those after it "
        "older, nothing published tells"
    ),
    ("laminar", "12", ""): (
        "the figure's bars for Laminar are those of figure 11 within .3 % and the baselines' at 16 GPUs the same,"
        " though responses are a fifth as long and wait for tools: bars, caption and text disagree"
    ),
    ("laminar", "table 1", ""): _WHOLE,
    ("laminar", "11", ""): (
        "one-step trains on 8 GPUs at 16 and 32 GPUs, 28.5 and 45.3 thousand tokens/s, and Laminar generates on 8"
        " at both, 35.0 and 66.9: neither stage tells what holds it back at 16"
    ),
}
"""By paper, figure and the beginning of the system's name."""


def reason(row: Mapping[str, Any]) -> str:
    """Of a row or a ratio that is far off."""
    found = [
        (len(name), text)
        for (paper, figure, name), text in REASONS.items()
        if (paper, figure) == (row["paper"], row["figure"]) and row["system"].startswith(name)
    ]
    return max(found, default=(0, "not known"))[1]


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
                    **{name: row[name] for name in IDENTITY},
                    "system": f"{row['system']} / {other['system']}",
                    "predicted": predicted,
                    "published": published,
                    "error": predicted / published - 1,
                }


def is_throughput(row: Row) -> bool:
    """Whether it is one that was fitted on."""
    return bool(row["fitted"] and row["published"] and THROUGHPUTS.get(row["paper"]) == row["figure"])


def _place(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in IDENTITY if name != "system")


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


SHOWN = (*IDENTITY, "predicted", "published")


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


COLOURS = {
    "verl": "tab:gray",
    "colocation": "tab:brown",
    "one_step": "tab:orange",
    "stream": "tab:olive",
    "sync": "tab:olive",
    "areal": "tab:blue",
    "async": "tab:green",
    "laminar": "tab:green",
}
BAND = 1.3


def draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Throughputs of both papers, each with the band of ± 30 %."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    for axis, (paper, unit) in zip(axes, (("laminar", "thousand tokens/s"), ("streamrl", "samples/s")), strict=True):
        mine = [row for row in rows if row["paper"] == paper and is_throughput(row)]
        for system in dict.fromkeys(row["system"] for row in mine):
            points = [row for row in mine if row["system"] == system]
            axis.scatter(
                [row["published"] for row in points],
                [row["predicted"] for row in points],
                s=18,
                color=COLOURS[system],
                label=system,
            )
        if mine:
            ends = [min(row["published"] for row in mine) / BAND, max(row["published"] for row in mine) * BAND]
            axis.plot(ends, ends, color="black", linewidth=0.8)
            axis.fill_between(
                ends, [end / BAND for end in ends], [end * BAND for end in ends], alpha=0.12, color="black"
            )
            axis.legend(fontsize=8)
        axis.set(xscale="log", yscale="log", xlabel=f"published, {unit}", ylabel="predicted", title=paper)
    figure.savefig(path, dpi=110)
    plt.close(figure)
