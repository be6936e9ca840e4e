"""Code of ours in the processes of a run: Python imports a ``sitecustomize`` on its path before anything else."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what a process imports before all else is to be little
    from streamrl.deploy.local.supervisor import ChildSpec

ROOT = Path(__file__).parents[3]
COMMAND = "streamrl"


def with_code(spec: "ChildSpec", folder: Path, module: str, **environment: str) -> "ChildSpec":
    """The process, which first calls ``install`` of a module of the tests; ``environment``: what that reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(f"from {module} import install\n\ninstall()\n")
    path = {"PYTHONPATH": f"{folder}:{ROOT}"}
    return replace(spec, environment={**spec.environment, **path, **environment})


def is_role() -> bool:
    """Whether this is a process of the run itself, and not one that it started, such as an engine's or a reward's."""
    return COMMAND in sys.orig_argv
