"""The processes of a local run as commands, in the order in which they start."""

import sys
from collections.abc import Sequence

from deploy.runs.directory import RunDirectory
from deploy.supervisor.child import ChildSpec

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def child_specs(directory: RunDirectory, workers: int, overrides: Sequence[str]) -> list[ChildSpec]:
    """Coordinator, relay, trainer, workers, dispatcher. The trainer is the one whose good end ends the run."""

    def spec(name: str, role: str, *arguments: str, essential: bool = False, optional: bool = False) -> ChildSpec:
        command = [sys.executable, "-m", "deploy.cli.app", role, str(directory.config), *arguments, *overrides]
        log_path = directory.logs / f"{name}.log"
        return ChildSpec(name, command, log_path, ONE_THREAD, essential=essential, optional=optional)

    return [
        spec("coordinator", "coordinator"),
        spec("relay", "relay"),
        spec("trainer", "trainer", essential=True),
        *(spec(f"worker-{number}", "worker", "--id", f"worker-{number}") for number in range(workers)),
        spec("dispatcher", "dispatcher"),
    ]
