"""All rows that there are, by part."""

from collections.abc import Iterator

from benchmarks.simulation import papers
from benchmarks.simulation.details import Detail, every
from benchmarks.simulation.papers import LAMINAR, STREAMRL, LaminarRow, StreamRow
from benchmarks.simulation.parameters import STREAMRL_SYSTEMS
from benchmarks.simulation.rows import Task
from benchmarks.simulation.scale import scale_tasks

PARTS = ("streamrl", "laminar", "details", "scale")
OTHERS = (
    "synchronous",
    "laminar_without_repack",
    "streamrl_ranker_repack",
    "areal, k = 1",
    "areal, k = 2",
    "areal, k = 4",
)
"""Simulated beside what Laminar compared, in the configurations ``DETAILED``."""
DISPATCH_FITTED = ("7B", "32B")
"""Models on whose figure 9 the completions that a StreamRL replica runs at once were fitted."""
DETAILED = (("7B", 64), ("32B", 128), ("72B", 1024))


def tasks(part: str) -> Iterator[Task | Detail]:
    """Of a part."""
    match part:
        case "streamrl":
            for row in STREAMRL:
                yield from _streamrl_tasks(row)
            for model, published in papers.DISPATCH.items():
                gpus = next(row.generating for row in STREAMRL if (row.lengths, row.model) == ("20K", model))
                for known, share in published.items():
                    is_fitted = model in DISPATCH_FITTED
                    yield Task(part, "streamrl", "9", model, gpus, known, share, is_fitted, "20K", "dispatch")
        case "laminar":
            for compared in LAMINAR:
                yield from _laminar_tasks(compared)
            for gpus, rates in papers.TOOL_CALLING.items():
                for system, value in zip(papers.TOOL_SYSTEMS, rates, strict=True):
                    yield Task(part, "laminar", "12", "7B", gpus, system, value)
        case "details":
            yield from every()
        case "scale":
            yield from scale_tasks()


def _streamrl_tasks(row: StreamRow) -> Iterator[Task]:
    published = dict(zip(papers.STREAMRL_SYSTEMS, row.published, strict=False))
    for system in STREAMRL_SYSTEMS:
        value = published.get(system)
        yield Task(
            "streamrl", "streamrl", "8", row.model, row.gpus, system, value, value is not None, lengths=row.lengths
        )


def _laminar_tasks(row: LaminarRow) -> Iterator[Task]:
    published = dict(zip(papers.SYSTEMS, row.published, strict=False))
    others = OTHERS if (row.model, row.gpus) in DETAILED else ()
    for system in (*papers.SYSTEMS, *others):
        value = published.get(system)
        yield Task("laminar", "laminar", "11", row.model, row.gpus, system, value, value is not None)
