"""The processes of a local run as commands, in the order in which they start."""

import sys
from collections.abc import Sequence

from deploy.runs.directory import RunDirectory
from deploy.supervisor.child import ChildSpec

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def worker_spec(directory: RunDirectory, number: int, overrides: Sequence[str]) -> ChildSpec:
    """One generation worker; its id is its process's name."""
    name = f"worker-{number}"
    return _spec(directory, overrides, name, "worker", "--id", name)


def child_specs(
    directory: RunDirectory, workers: int, overrides: Sequence[str], *, ranker: bool = False
) -> list[ChildSpec]:
    """Coordinator, relay, trainer, workers, dispatcher, and the ranker if there is one.

    The trainer is the one whose good end ends the run; without the ranker it goes on.
    """
    return [
        _spec(directory, overrides, "coordinator", "coordinator"),
        _spec(directory, overrides, "relay", "relay"),
        _spec(directory, overrides, "trainer", "trainer", essential=True),
        *(worker_spec(directory, number, overrides) for number in range(workers)),
        _spec(directory, overrides, "dispatcher", "dispatcher"),
        *([_spec(directory, overrides, "ranker", "ranker", optional=True)] if ranker else []),
    ]


def _spec(
    directory: RunDirectory,
    overrides: Sequence[str],
    name: str,
    role: str,
    *arguments: str,
    essential: bool = False,
    optional: bool = False,
) -> ChildSpec:
    command = [sys.executable, "-m", "deploy.cli.app", role, str(directory.config), *arguments, *overrides]
    log_path = directory.logs / f"{name}.log"
    return ChildSpec(name, command, log_path, ONE_THREAD, essential=essential, optional=optional)
