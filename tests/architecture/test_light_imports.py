import json
import math
import resource
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

MODELS = {"torch", "transformers", "vllm", "datasets", "reasoning_gym"}
CLIENTS = {"aiokafka", "aiohttp", "pyarrow", "textual", "jgo"}
STAGES = (
    ("streamrl, streamrl.cli.app", MODELS | CLIENTS | {"pydantic", "numpy"}),
    ("streamrl.schemas.codec, streamrl.bus.memory", MODELS | CLIENTS),
    ("streamrl.inspection.audit.command, streamrl.inspection.dead_letters", MODELS | CLIENTS),
    ("streamrl.deploy.wiring.process, streamrl.deploy.wiring.build", MODELS | {"aiohttp", "pyarrow", "textual", "jgo"}),
    ("streamrl.deploy.local.run, streamrl.deploy.local.savepoints", MODELS | {"aiohttp", "pyarrow", "textual", "jgo"}),
    (
        "streamrl.inspection.dashboard.server, streamrl.inspection.diagnostics.doctor, "
        "streamrl.inspection.diagnostics.status, "
        "streamrl.inspection.diagnostics.tail, streamrl.inspection.export, streamrl.inspection.replay.show, "
        "streamrl.inspection.report.page, "
        "streamrl.inspection.terminal.command",
        MODELS | {"pyarrow", "textual", "jgo"},
    ),
)
"""What is imported one after the other, and what is not to be there by then: torch alone costs more than a second and
half a gigabyte."""


def test_modules_import_no_heavy_library_that_they_do_not_need() -> None:
    code = "import json, sys\n" + "".join(
        f"import {modules}\nprint(json.dumps(sorted({heavy!r} & set(sys.modules))))\n" for modules, heavy in STAGES
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert {stage: json.loads(line) for (stage, _), line in zip(STAGES, output.splitlines(), strict=True)} == {
        stage: [] for stage, _ in STAGES
    }


@pytest.mark.parametrize("command", [[], ["run"], ["worker"], ["kafka", "up"], ["demo"], ["report"], ["top"]])
def test_help_costs_a_few_times_what_its_library_does(command: list[str]) -> None:
    """Half a second where the library takes a ninth of one. The two are measured in turn, five times at most: a slow
    processor is slow for both, and one that is slow for a moment is no import."""
    ratios: list[float] = []
    while len(ratios) < 5 and min(ratios, default=math.inf) >= 4.5:
        library, _ = _child_seconds("-c", "import typer")
        help_text, output = _child_seconds("-m", "streamrl.cli.app", *command, "--help")
        assert "Usage" in output
        ratios.append(help_text / library)
    assert min(ratios) < 4.5


def _child_seconds(*arguments: str) -> tuple[float, str]:
    """The processor time that an interpreter took, and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout
