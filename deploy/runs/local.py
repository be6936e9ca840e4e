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
from deploy.reporting.report import write_report
from deploy.reporting.samples import Samples, read_samples
from deploy.reporting.summary import build_summary, summary_lines, write_summary
from deploy.runs.children import child_specs, worker_spec
from deploy.runs.directory import RunDirectory
from deploy.runs.evaluation import Evaluation, evaluate
from deploy.settings.loading import as_toml
from deploy.settings.tree import Settings
from deploy.supervisor.child import ChildSpec
from deploy.supervisor.fleet import Fleet
from deploy.supervisor.supervisor import Supervisor
from deploy.wiring.broker import broker_for
from deploy.wiring.process import configure_logging

log = structlog.get_logger()


@dataclass(frozen=True)
class Trained:
    """What is known when the processes have ended."""

    state: RunState
    samples: Samples
    seconds: float
    restarts: dict[str, int]
    finished: bool


def run_locally(settings: Settings) -> int:
    """Train; the exit code is 0 if the last step was reached, 130 if the run was stopped.

    Raises:
        UserError: something the user can mend, before or during the run.
        StreamRLError: a process could not be kept alive.
    """
    configure_logging()
    directory = RunDirectory(settings.run.path)
    directory.create()
    directory.config.write_text(as_toml(settings))
    engine, workers = settings.generation.engine, settings.run.workers
    print(f"run {settings.run.name}: engine {engine}, {workers} workers, in {directory.path}/")
    with broker_for(settings.kafka.bootstrap_servers, print, directory.kafka) as address:
        before = _evaluated(settings, settings.model.path, "before")
        trained = asyncio.run(_train(settings, directory, address))
    after = _evaluated(settings, directory.newest_checkpoint(), "after") if trained.finished else None
    _conclude(settings, directory, trained, before, after)
    return 0 if trained.finished else 130


def _evaluated(settings: Settings, model: object, moment: str) -> Evaluation | None:
    if settings.evaluation.function is None or model is None:
        return None
    result = evaluate(settings.evaluation.function, str(model), settings.run.seed)
    print(f"{moment} training: " + ", ".join(f"{name} {value:.3f}" for name, value in result.metrics.items()))
    return result


async def _train(settings: Settings, directory: RunDirectory, address: str) -> Trained:
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
    await _supervise(supervisor, observer, fleet, settings.training.max_steps, stop)
    seconds = time.monotonic() - began
    samples = await read_samples(bus, settings.run.name)
    return Trained(observer.state, samples, seconds, supervisor.restarts, supervisor.finished.is_set())


def _worker_spec(directory: RunDirectory, overrides: Sequence[str], number: int) -> ChildSpec:
    return worker_spec(directory, number, overrides)


async def _supervise(
    supervisor: Supervisor, observer: Observer, fleet: Fleet | None, max_steps: int, stop: asyncio.Event
) -> None:
    over, shown = asyncio.Event(), asyncio.Event()
    watching = [asyncio.create_task(loop.run(over)) for loop in (observer, fleet) if loop is not None]
    showing = asyncio.create_task(show_progress(observer.state, max_steps, supervisor, shown))
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
    before: Evaluation | None,
    after: Evaluation | None,
) -> None:
    summary = build_summary(
        trained.state,
        engine=settings.generation.engine,
        seed=settings.run.seed,
        train_seconds=trained.seconds,
        before=before.metrics if before else {},
        after=after.metrics if after else {},
        restarts=sum(trained.restarts.values()),
    )
    write_summary(directory.summary, summary)
    write_report(
        directory.report,
        title=settings.run.name,
        summary=summary,
        state=trained.state,
        samples=trained.samples,
        evaluated={"before": before.samples if before else [], "after": after.samples if after else []},
        config=directory.config.read_text(),
    )
    print("\n".join(summary_lines(summary)))
    print(f"report: {directory.report}")
