"""One whole run on a real broker that loses every process and the broker; `make chaos` does many more."""

from pathlib import Path

import pytest

from bus.embedded.node import free_ports
from tests.chaos.faults.schedule import plan_of
from tests.chaos.runs.brokers import Brokers
from tests.chaos.runs.chaos_run import execute
from tests.pipeline.tiny_model import save_tiny_model

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.chaos]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("fault", "seed"),
    [("all-kill", 3)],
)
async def test_a_run_survives_its_faults_and_every_record_has_one_fate(
    tmp_path: Path, model: Path, fault: str, seed: int
) -> None:
    plan = plan_of(seed, fault)
    brokers = Brokers(tmp_path)
    try:
        outcome = await execute(plan, await brokers.only(plan.broker), tmp_path, model, free_ports(1)[0])
    finally:
        await brokers.close()
    assert outcome.all_problems == [], f"{plan}; reproduce: {plan.command}"
    assert outcome.findings.trained > 0
