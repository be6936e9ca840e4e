"""Writes the facts, the summary and the report of a run that has ended."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import structlog

from streamrl.bus.history import BusHistory
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.deploy.local.evaluation import Evaluation
from streamrl.inspection.audit.following import closing_report
from streamrl.inspection.audit.report import AuditReport
from streamrl.inspection.environment import environment
from streamrl.inspection.report.gathering import gather_topics
from streamrl.inspection.report.page import write_page
from streamrl.inspection.report.record import RunFacts, TopicDigest, read_record, write_facts
from streamrl.inspection.report.summary import build_summary, summary_lines, write_summary
from streamrl.inspection.source import PastRun
from streamrl.observability.run_state.state import RunState
from streamrl.schemas.errors import BrokerError, BusError, DataLossRefused, StreamRLError, UserError
from streamrl.settings.run_directory import RunDirectory
from streamrl.settings.tree import Settings

log = structlog.get_logger()


@dataclass(frozen=True)
class TrainingOutcome:
    """The result of training, once all processes have ended.

    ``crashes``: one message for each process that crashed while it was stopped. ``evaluating``: the evaluation of the
    trained model, which may still run; None: the last step was not reached.
    """

    state: RunState
    topics: TopicDigest | None
    seconds: float
    restarts: dict[str, int]
    finished: bool
    audit: AuditReport | None = None
    crashes: Sequence[str] = ()
    evaluating: "Future[Evaluation | None] | None" = None


async def gathered_topics(bus: KafkaBus, settings: Settings, directory: RunDirectory) -> TopicDigest | None:
    """The report's data from the topics; None if they cannot be read, because a missing report must not fail a run."""
    try:
        history, weights = BusHistory(bus, client_id="report"), settings.rewards.weight_by_name
        return await gather_topics(history, settings.run.name, directory.logs, weights)
    except (BusError, BrokerError, DataLossRefused) as error:
        log.warning(
            f"the topics cannot be read for the report, which is incomplete; try `streamrl report --run "
            f"{directory.path} --from-topics`",
            error=str(error),
        )
        return None


async def audited(bus: KafkaBus, settings: Settings, directory: RunDirectory) -> AuditReport | None:
    """The audit at the run's end, continued from the one during the run; None if it fails."""
    try:
        return await closing_report(PastRun(directory, settings), BusHistory(bus, client_id="audit"))
    except (StreamRLError, OSError) as error:
        log.warning(f"the audit at the run's end failed; try `streamrl audit --run {directory.path}`", error=str(error))
        return None


def conclude(
    settings: Settings,
    directory: RunDirectory,
    trained: TrainingOutcome,
    resumed: int,
    before: Evaluation | None,
    after: Evaluation | None,
) -> None:
    """Write summary, facts and report, and print the summary. ``resumed``: the step that it continued from, or 0.

    Raises:
        UserError: a file cannot be written; the run itself is complete.
    """
    try:
        summary = build_summary(
            trained.state,
            engine=settings.generation.engine,
            seed=settings.run.seed,
            run_seconds=trained.seconds,
            resumed_from=resumed,
            held_out_prompts=before.prompts if before else None,
            before=before.metrics if before else {},
            after=after.metrics if after else {},
            restarts=sum(trained.restarts.values()),
            audit=trained.audit,
        )
        # This file tells a later start that the run is complete.
        write_summary(directory.summary, summary)
        samples = {"before": before.samples if before else [], "after": after.samples if after else []}
        evaluated = {when: tuple(rows) for when, rows in samples.items()}
        facts = RunFacts(environment=environment(), evaluated=evaluated, topics=trained.topics)
        write_facts(directory.gathered, facts)
        # Last, because the page is made from the files written above.
        write_page(directory.report, [read_record(directory, settings.run.name)])
        print("\n".join(summary_lines(summary)))
        print(f"report: {directory.report}")
    except OSError as error:
        raise UserError(
            f"expected to write summary and report of step {trained.state.progress.step} into "
            f"{directory.path.absolute()}, got: {error.strerror or error}; free space there, then run the same "
            "command again: checkpoints are complete, and no step is taken twice"
        ) from error
