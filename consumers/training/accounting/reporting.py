"""The messages in which the trainer answers for its steps. Sends nothing."""

from dataclasses import dataclass

from consumers.training.accounting.gathering import GatheredStep
from consumers.training.accounting.metrics import finite
from schemas.identifiers import PolicyVersion
from schemas.messages.reports import RefusedStep, StepReport

PROBLEM_LIMIT = 4096


@dataclass(frozen=True)
class Weights:
    """What the weights in memory are known by. ``manifest_sha256`` None: they were not exported."""

    version: PolicyVersion
    manifest_sha256: str | None
    digests: dict[str, str]
    is_last: bool


@dataclass(frozen=True)
class Ancestry:
    """What a lineage went on from: the version of a checkpoint, and how many of its lineage's skip rows it has."""

    parent: PolicyVersion | None
    parent_skips: int


def first_report(algorithm: str, weights: Weights, ancestry: Ancestry, prompt_cursor: int, now: float) -> StepReport:
    """That a lineage exists, and what it went on from."""
    return StepReport(
        algorithm=algorithm,
        step=weights.version.number,
        version=weights.version,
        manifest_sha256=weights.manifest_sha256,
        group_ids=(),
        micro_batches=(),
        metrics={},
        digests=weights.digests,
        parent=ancestry.parent,
        parent_skips=ancestry.parent_skips,
        prompt_cursor=prompt_cursor,
        finished=weights.is_last,
        sent_at=now,
    )


def step_report(
    algorithm: str,
    weights: Weights,
    gathered: GatheredStep,
    metrics: dict[str, float],
    prompt_cursor: int,
    now: float,
) -> StepReport:
    """What the step just taken consumed, and the weights that came of it."""
    return StepReport(
        algorithm=algorithm,
        step=weights.version.number,
        version=weights.version,
        manifest_sha256=weights.manifest_sha256,
        group_ids=gathered.group_ids,
        micro_batches=tuple(gathered.micro_batches),
        left_out=gathered.left_out_refs,
        metrics=metrics,
        digests=weights.digests,
        prompt_cursor=prompt_cursor,
        finished=weights.is_last,
        sent_at=now,
    )


def refused_step(
    algorithm: str,
    version: PolicyVersion,
    gathered: GatheredStep,
    problem: str,
    metrics: dict[str, float],
    now: float,
) -> RefusedStep:
    """A gradient that was not applied to the weights of ``version``."""
    return RefusedStep(
        algorithm=algorithm,
        step=version.number + 1,
        version=version,
        problem=problem[:PROBLEM_LIMIT],
        group_ids=gathered.group_ids,
        micro_batches=tuple(gathered.micro_batches),
        left_out=gathered.left_out_refs,
        metrics=finite(metrics),
        sent_at=now,
    )
