"""Serves a process's metrics over HTTP on a free port, and writes the file by which Prometheus finds the port."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from wsgiref.simple_server import WSGIServer

import structlog
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    start_http_server,
)

from streamrl.schemas.errors import UserError
from streamrl.schemas.files import write_atomically

log = structlog.get_logger()

# Ports count up from metrics.port; workers come last, because there may be any number of them.
_SINGLE = (
    "coordinator",
    "relay",
    "trainer",
    "dispatcher",
    "ranker",
    "audit",
    "gateway",
    "evaluator",
    "environments",
    "sender",
)
OFFSETS = {name: offset for offset, name in enumerate(_SINGLE)}
WORKERS_FROM = len(_SINGLE)
TRIES = 100
"""Number of ports to try: other runs on the same machine may have taken some."""


def first_port(base: int, process: str) -> int:
    """The port that a process tries first, so that it usually gets the same one. A worker's depends on its number."""
    if (offset := OFFSETS.get(process)) is not None:
        return base + offset
    number = re.search(r"(\d{1,3})$", process)
    return base + WORKERS_FROM + (int(number[1]) if number else 0)


@contextmanager
def endpoint(registry: CollectorRegistry, host: str, base: int, process: str, target_file: Path) -> Iterator[int]:
    """Serve the registry's metrics during the block; gives the port.

    During the block ``target_file`` has the address, in the form that Prometheus's ``file_sd_configs`` reads.

    Raises:
        UserError: the address is not this machine's, or no port is free.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    server, thread, port = _serve(registry, host, first_port(base, process))
    _write_target(target_file, f"{host}:{port}", process)
    log.info("metrics served", address=f"http://{host}:{port}/metrics")
    try:
        yield port
    finally:
        with suppress(OSError):
            target_file.unlink()
        server.shutdown()
        server.server_close()
        thread.join(timeout=2.0)


def _serve(registry: CollectorRegistry, host: str, first: int) -> tuple[WSGIServer, Thread, int]:
    refusal: OSError | None = None
    for port in range(first, min(first + TRIES, 1 << 16)):
        try:
            return (*start_http_server(port, host, registry), port)
        except OSError as error:
            refusal = error
    raise UserError(
        f"expected a free port for metrics, got none in the {TRIES} from {first} at {host} ({refusal}); "
        "choose another metrics.port or metrics.host"
    )


def _write_target(path: Path, target: str, process: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps([{"targets": [target], "labels": {"process": process}}]))
    except OSError as error:
        log.warning("file for Prometheus not written, it will not find this process", path=str(path), error=str(error))
