"""A tiny character model in a Hugging Face directory, and runs that end with their test."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.emulated import EmulatedRun, emulated_run_in
from tests.pipeline.local_run import LocalRun, write_config
from tests.pipeline.tiny_model import save_tiny_model

Start = Callable[..., LocalRun]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="package")
def emulated_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedRun]:
    """A run without a model that came to its good end."""
    with emulated_run_in(tmp_path_factory.mktemp("emulated")) as run:
        yield run


@pytest.fixture
def start(tmp_path: Path, tiny_model: Path, bootstrap_servers: str, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Start a run on the tests' broker, under a name of its own."""
    started: list[LocalRun] = []

    def starter(*arguments: str, own_broker: bool = False, **sections: dict[str, Any]) -> LocalRun:
        name = f"t{abs(hash(request.node.name)) % 10**8}-{len(started)}"
        config = write_config(tmp_path, tiny_model, name, **sections)
        broker = () if own_broker else (f"--kafka.bootstrap_servers={bootstrap_servers}",)
        started.append(LocalRun.start(config, name, *broker, *arguments))
        return started[-1]

    yield starter
    for run in started:
        run.end()
