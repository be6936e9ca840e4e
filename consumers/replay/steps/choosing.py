"""Finds the step that somebody asks for, or says in one line why there is none. Pure."""

from collections.abc import Sequence

from consumers.replay.steps.chain import StepLog, Stretch, holding
from schemas.errors import UserError
from schemas.identifiers import PolicyVersion
from schemas.messages.reports import RefusedStep, StepReport

Step = StepReport | RefusedStep


def taken_step(log: StepLog, step: int, lineage: int | None = None) -> StepReport:
    """The report of a step of the surviving chain, or of a lineage's own.

    Raises:
        UserError: the step was never taken, was undone by a crash, or its report is gone.
    """
    chain = log.chain(lineage)
    stretch = holding(chain, step)
    if stretch is None:
        raise UserError(_absent(log, step, chain, lineage))
    report = log.reports.get(PolicyVersion(stretch.lineage, step))
    if report is None:
        raise UserError(
            f"expected the report of step {step} (lineage {stretch.lineage}) on the steps topic, got none: "
            "retention has deleted it; choose a later step, or read an export made before"
        )
    return report


def steps_between(log: StepLog, first: int, last: int, lineage: int | None = None) -> list[StepReport]:
    """The reports of steps ``first`` to ``last``, both inclusive.

    Raises:
        UserError: one of them is missing, or there is nothing between.
    """
    if first > last:
        raise UserError(f"expected --steps FIRST:LAST with FIRST <= LAST, got {first}:{last}")
    return [taken_step(log, step, lineage) for step in range(first, last + 1)]


def refused_step(log: StepLog, step: int, attempt: int | None, lineage: int | None = None) -> RefusedStep:
    """An attempt at a step whose gradient was not applied, counted from 1; None: the only one.

    Raises:
        UserError: there is no such attempt, or there are several and none was named.
    """
    attempts = log.attempts(step, log.chain(lineage))
    if attempt is None and len(attempts) == 1:
        return attempts[0]
    if attempt is None or not 1 <= attempt <= len(attempts):
        raise UserError(
            f"expected an attempt at step {step} that was refused, got {attempt or 'none'}: {listed(attempts)}"
        )
    return attempts[attempt - 1]


def listed(attempts: Sequence[RefusedStep]) -> str:
    """Refused attempts in one line."""
    if not attempts:
        return "this step was never refused"
    return "; ".join(
        f"--attempt {number} ({refused.version}): {refused.problem}" for number, refused in enumerate(attempts, 1)
    )


def _absent(log: StepLog, step: int, chain: Sequence[Stretch], lineage: int | None) -> str:
    if attempts := log.attempts(step, chain):
        return f"expected a step that was taken, got step {step}, which was only refused: {listed(attempts)}"
    there = ", ".join(str(stretch) for stretch in chain if stretch.last >= stretch.first) or "no step yet"
    undone = [version for version in log.reports if version.number == step and not log.counts(version)]
    if undone and lineage is None:
        version = max(undone)
        return (
            f"expected a step of the surviving chain ({there}), got step {step}, which lineage {version.lineage} took "
            f"and a crash undid; replay it with --lineage {version.lineage}"
        )
    return f"expected one of {there}, got step {step}"
