import json
import resource
import subprocess
import sys

import pytest

MODELS = {"torch", "transformers", "vllm", "datasets", "reasoning_gym"}
CLIENTS = {"aiokafka", "aiohttp", "pyarrow", "textual", "jgo"}
STAGES = (
    ("streamrl, streamrl.cli.app", MODELS | CLIENTS | {"pydantic", "numpy"}),
    ("schemas.codec, bus.memory", MODELS | CLIENTS),
    ("inspection.audit.command, inspection.dead_letters", MODELS | CLIENTS),
    ("deploy.wiring.process, deploy.wiring.build", MODELS | {"aiohttp", "pyarrow", "textual", "jgo"}),
    ("deploy.local.run, deploy.local.savepoints", MODELS | {"aiohttp", "pyarrow", "textual", "jgo"}),
    (
        "inspection.dashboard.command, inspection.diagnostics.doctor, inspection.diagnostics.status, "
        "inspection.diagnostics.tail, inspection.export, inspection.replay.show, inspection.report.page, "
        "inspection.terminal.command",
        MODELS | {"pyarrow", "textual", "jgo"},
    ),
)
"""What is imported one after the other, and what is not to be there by then: torch alone costs more than a second and
half a gigabyte."""


def test_whoever_has_no_use_for_a_heavy_library_loads_none() -> None:
    code = "import json, sys\n" + "".join(
        f"import {modules}\nprint(json.dumps(sorted({heavy!r} & set(sys.modules))))\n" for modules, heavy in STAGES
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert {stage: json.loads(line) for (stage, _), line in zip(STAGES, output.splitlines(), strict=True)} == {
        stage: [] for stage, _ in STAGES
    }


@pytest.mark.parametrize("command", [[], ["run"], ["worker"], ["kafka", "up"], ["demo"], ["report"], ["top"]])
def test_help_costs_under_half_a_second(command: list[str]) -> None:
    """Processor time of the child, which a busy machine does not change as it does wall-clock."""
    before = _child_seconds()
    done = subprocess.run(
        [sys.executable, "-m", "streamrl.cli.app", *command, "--help"], capture_output=True, text=True, check=True
    )
    assert "Usage" in done.stdout
    assert _child_seconds() - before < 0.5


def _child_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
