"""`streamrl doctor`: checks settings, machine, broker and clocks, and prints each finding at once."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import uvloop

from streamrl.bus.embedded import detached
from streamrl.bus.kafka.connection import partition_counts
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.inspection.diagnostics.checks import (
    Finding,
    as_rows,
    check_clocks,
    check_cluster,
    check_codecs,
    check_disk,
    check_embedded_broker,
    check_engine,
    check_placement,
    exit_code,
    fail,
    ok,
    start_engine_probe,
    verdict,
)
from streamrl.inspection.diagnostics.connect import CLIENT_ID, RunConnection, connect, runs_of
from streamrl.inspection.environment import read_machine
from streamrl.inspection.source import open_run
from streamrl.schemas.errors import BusError, SettingsError, UserError
from streamrl.schemas.plain_text import plain_text
from streamrl.settings.tree import Settings


def run_doctor(run: Path | None, servers: str | None, *, as_json: bool) -> int:
    """Print the findings. The exit code is 2 if a check fails."""
    findings: list[Finding] = []
    for each in _findings(run, servers):
        findings.append(each)
        if not as_json:
            print(plain_text(each.line, keep="\n"), flush=True)
    if as_json:
        print(json.dumps(as_rows(findings)))
    else:
        print("\n".join(verdict(findings)))
    return exit_code(findings)


def _findings(run: Path | None, servers: str | None) -> Iterator[Finding]:
    settings, problem = _settings(run)
    if problem is not None:
        yield problem
    engine = "transformers" if settings is None else settings.generation.engine
    # Started first and checked last: importing an engine takes longest, and runs during the other checks.
    probe = start_engine_probe(engine)
    try:
        kafka = KafkaSettings() if settings is None else settings.kafka
        yield from check_codecs(kafka.compression_type)
        yield from check_disk(_places(settings))
        if settings is not None:
            yield from check_placement(settings, read_machine())
        yield from _broker(run, servers)
    finally:
        # Also if a check raised, so that the probe's process does not outlive this one.
        findings = list(check_engine(engine, probe))
    yield from findings


def _settings(run: Path | None) -> tuple[Settings | None, Finding | None]:
    if run is None:
        return None, None
    try:
        settings = open_run(run).settings
    except SettingsError as error:
        return None, fail("settings", str(error), "`streamrl config show` prints the resolved settings")
    except UserError:
        return None, None  # a run that only its broker knows
    return settings, ok("settings", f"run {settings.run.name}, engine {settings.generation.engine}, of {run}")


def _places(settings: Settings | None) -> dict[str, Path]:
    if settings is None:
        return {"runs": Path("runs"), "the broker of `streamrl kafka up`": detached.default_data_dir()}
    return {"checkpoints, weights and logs": settings.run.path}


def _broker(run: Path | None, servers: str | None) -> Iterable[Finding]:
    try:
        connection = connect(run, servers)
    except UserError:
        return [
            ok("broker", "none was named and none is running here; `streamrl run` starts one of its own"),
            *check_embedded_broker(needed=True),
        ]
    found = uvloop.run(_with_broker(connection))
    return [*found, *check_embedded_broker(needed=False)]


async def _with_broker(connection: RunConnection) -> list[Finding]:
    if not connection.run:
        try:
            runs = runs_of(await partition_counts(connection.kafka, CLIENT_ID))
        except BusError:
            runs = []  # the check of the broker reports the error
        if len(runs) == 1:
            connection = RunConnection(connection.kafka, runs[0], connection.settings)
    findings = await check_cluster(connection)
    if connection.run and findings[0].level != "fail":
        findings.append(await check_clocks(connection))
    return findings
