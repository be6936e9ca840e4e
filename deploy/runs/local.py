"""`streamrl run`: broker, topics, evaluation before, all processes under supervision, evaluation after, report."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from deploy.bus.kafka_bus import KafkaBus
from deploy.bus.topic_admin import apply_topics
from deploy.observation.observer import Observer
from deploy.observation.progress import show_progress
from deploy.observation.state import RunState
from deploy.reporting.gathering.environment import environment
from deploy.reporting.gathering.gathered import Gathered, TopicFacts, write_gathered
from deploy.reporting.gathering.topics import gather_topics
from deploy.reporting.page import write_page
from deploy.reporting.record.run_record import read_record
from deploy.reporting.summary import build_summary, summary_lines, write_summary
from deploy.runs.beginning import going_on_line, is_over, over_line, resumed_step
from deploy.runs.children import child_specs, worker_spec
from deploy.runs.directory import RunDirectory
from deploy.runs.evaluation import Evaluation, evaluate
from deploy.runs.watching import Progress, watch
from deploy.settings.loading import as_toml
from deploy.settings.tree import Settings
from deploy.supervisor.child import ChildSpec
from deploy.supervisor.fleet import Fleet
from deploy.supervisor.supervisor import Supervisor
from deploy.wiring.broker import broker_for
from deploy.wiring.process import configure_logging
from schemas.errors import BrokerError, BusError, DataLossRefused

log = structlog.get_logger()


@dataclass(frozen=True)
class Trained:
    """What is known when the processes have ended."""

    state: RunState
    topics: TopicFacts | None
    seconds: float
    restarts: dict[str, int]
    finished: bool


def run_locally(settings: Settings, *, top: bool = False) -> int:
    """Train; the exit code is 0 if the last step was reached, 130 if the run was stopped. ``top``: with the live view.

    Of a run that is over nothing is touched.

    Raises:
        UserError: something the user can mend, before or during the run.
        StreamRLError: a process could not be kept alive.
    """
    configure_logging()
    directory = RunDirectory(settings.run.path)
    resumed = resumed_step(settings)
    if is_over(settings, directory, resumed):
        print(over_line(settings, resumed))
        return 0
    directory.create()
    engine, workers = settings.generation.engine, settings.run.workers
    print(f"run {settings.run.name}: engine {engine}, {workers} workers, in {directory.path}/")
    if resumed:
        print(going_on_line(settings, directory.config, resumed))
    directory.config.write_text(as_toml(settings))
    with broker_for(settings.kafka.bootstrap_servers, print, directory.kafka) as address:
        before = _evaluated(settings, settings.model.path, "before")
        trained = asyncio.run(_train(settings, directory, address, top=top))
    after = _evaluated(settings, directory.newest_checkpoint(), "after") if trained.finished else None
    _conclude(settings, directory, trained, resumed, before, after)
    return 0 if trained.finished else 130


def _evaluated(settings: Settings, model: object, moment: str) -> Evaluation | None:
    if settings.evaluation.function is None or model is None:
        return None
    result = evaluate(settings.evaluation.function, str(model), settings.run.seed)
    print(f"{moment} training: " + ", ".join(f"{name} {value:.3f}" for name, value in result.metrics.items()))
    return result


async def _train(settings: Settings, directory: RunDirectory, address: str, *, top: bool) -> Trained:
    kafka = settings.kafka.model_copy(update={"bootstrap_servers": address})
    partitions = settings.loop.trajectory_partitions
    await apply_topics(address, settings.run.name, partitions, kafka.replication_factor, kafka)
    port = settings.relay.port or _free_port(settings.relay.host)
    overrides = [f"--kafka.bootstrap_servers={address}", f"--relay.port={port}"]
    specs = child_specs(directory, settings.run.workers, overrides, ranker=settings.lengths.refit == "process")
    supervisor = Supervisor(specs, settings.run.max_restarts, settings.run.shutdown_grace_s)
    bus = KafkaBus(kafka)
    observer = Observer(bus, settings.run.name)
    stop = _stop_on_signals()
    print(f"broker {address}; join with: streamrl worker {directory.config} {overrides[0]}")
    began = time.monotonic()
    fleet = None
    if settings.run.max_workers is not None:
        spec_of = partial(_worker_spec, directory, overrides)
        fleet = Fleet(bus, settings.run.name, supervisor, spec_of, settings.run.workers, settings.run.max_workers)
    progress: Progress = partial(show_progress, observer.state, settings.training.max_steps, supervisor)
    if top:
        progress = partial(watch, directory, address, progress)
    await _supervise(supervisor, observer, fleet, progress, stop)
    seconds = time.monotonic() - began
    topics = await _gathered_topics(bus, settings, directory)
    return Trained(observer.state, topics, seconds, supervisor.restarts, supervisor.finished.is_set())


async def _gathered_topics(bus: KafkaBus, settings: Settings, directory: RunDirectory) -> TopicFacts | None:
    """A report is not worth a failed run: what cannot be read is left out of it."""
    from deploy.inspection.bus_history import BusHistory

    try:
        return await gather_topics(BusHistory(bus, client_id="report"), settings.run.name, directory.logs)
    except (BusError, BrokerError, DataLossRefused) as error:
        log.warning("the report will lack what the topics say; streamrl report --from-topics", error=str(error))
        return None


def _worker_spec(directory: RunDirectory, overrides: Sequence[str], number: int) -> ChildSpec:
    return worker_spec(directory, number, overrides)


async def _supervise(
    supervisor: Supervisor, observer: Observer, fleet: Fleet | None, progress: Progress, stop: asyncio.Event
) -> None:
    over, shown = asyncio.Event(), asyncio.Event()
    watching = [asyncio.create_task(loop.run(over)) for loop in (observer, fleet) if loop is not None]
    showing = asyncio.ensure_future(progress(shown))
    try:
        await supervisor.run(stop)
    finally:
        over.set()
        results = [*await asyncio.gather(*watching, return_exceptions=True)]
        shown.set()
        results += await asyncio.gather(showing, return_exceptions=True)
        for error in (result for result in results if isinstance(result, Exception)):
            log.warning("the display or the fleet's size failed; the run itself did not", error=str(error))


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()

    def ask() -> None:
        if stop.is_set():
            os._exit(130)
        print("stopping; press Ctrl-C again to end at once")
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ask)
    return stop


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _conclude(
    settings: Settings,
    directory: RunDirectory,
    trained: Trained,
    resumed: int,
    before: Evaluation | None,
    after: Evaluation | None,
) -> None:
    summary = build_summary(
        trained.state,
        engine=settings.generation.engine,
        seed=settings.run.seed,
        run_seconds=trained.seconds,
        resumed_from=resumed,
        before=before.metrics if before else {},
        after=after.metrics if after else {},
        restarts=sum(trained.restarts.values()),
    )
    write_summary(directory.summary, summary)
    samples = {"before": before.samples if before else [], "after": after.samples if after else []}
    evaluated = {moment: tuple(rows) for moment, rows in samples.items()}
    write_gathered(directory.gathered, Gathered(environment=environment(), evaluated=evaluated, topics=trained.topics))
    write_page(directory.report, [read_record(directory, settings.run.name)])
    print("\n".join(summary_lines(summary)))
    print(f"report: {directory.report}")
