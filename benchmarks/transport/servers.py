"""The servers under test, on loopback, for as long as the measurement takes: Kafka and Redis."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from benchmarks.transport.kafka_path import PARTITIONS
from streamrl.bus.embedded.cluster import start_cluster
from streamrl.bus.embedded.node import free_ports
from streamrl.bus.kafka.topic_admin import apply_topics

RUN = "bench"
REDIS_SAVE = "3600 1"
"""PipelineRL's own setting: a snapshot after an hour in which something changed, so never within a measurement."""
START_TIMEOUT_S = 10


def redis_server() -> str | None:
    """The executable, if it is installed."""
    return shutil.which("redis-server")


def redis_version() -> str:
    """In words."""
    executable = redis_server()
    if executable is None:
        return "no redis-server"
    words = subprocess.run([executable, "--version"], capture_output=True, text=True, check=True).stdout.split()
    return "Redis " + next(word.removeprefix("v=") for word in words if word.startswith("v="))


@contextmanager
def kafka(folder: Path) -> Iterator[str]:
    """``host:port`` of an embedded broker with the catalogue's topics."""
    import asyncio

    with start_cluster(folder) as cluster:
        asyncio.run(apply_topics(cluster.bootstrap_servers, RUN, PARTITIONS))
        yield cluster.bootstrap_servers


@contextmanager
def redis_at(folder: Path) -> Iterator[str]:
    """``host:port`` of a Redis server with the options of PipelineRL's launcher, but bound to loopback only."""
    executable = redis_server()
    assert executable is not None, "redis-server is not installed: apt-get install redis-server"
    (port,) = free_ports(1)
    folder.mkdir(parents=True, exist_ok=True)
    command = [executable, "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), "--save", REDIS_SAVE]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            _wait_for_redis(port)
            yield f"127.0.0.1:{port}"
        finally:
            server.kill()


def _wait_for_redis(port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with redis.Redis(host="127.0.0.1", port=port) as client:
                client.ping()
            return
        except redis.ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def forget(path: str, address: str, stream: str) -> None:
    """Free what a round left behind, before the next one."""
    if path == "redis":
        host, _, port = address.partition(":")
        with redis.Redis(host=host, port=int(port)) as client:
            client.flushall()
    elif path == "files":
        (Path(address) / f"{stream}.jsonl").unlink()
