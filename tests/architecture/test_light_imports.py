import resource
import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "aiokafka", "vllm", "reasoning_gym", "datasets", "jgo", "pydantic", "textual"}


def test_help_imports_nothing_heavy() -> None:
    code = f"import streamrl.cli.app, sys; print(sorted({HEAVY!r} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_the_contract_imports_without_the_heavy_libraries() -> None:
    heavy = HEAVY - {"pydantic"}
    code = f"import schemas.codec, bus.memory, sys; print(sorted({heavy!r} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


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
