import json
import re
from pathlib import Path

import pytest

from tests.pipeline.accounts import read_accounts
from tests.pipeline.local_run import LocalRun

pytestmark = pytest.mark.long

NAME = "scaling-test"
GROUPS, SAMPLES = 8, 2
PHASES = ((4, 100), (12, 1500), (60, 60))
"""Steps and the length of their completions in tokens."""
STEPS = 34
CONFIG = """
[run]
directory = "{directory}"
name = "{name}"
workers = 2
max_workers = 3
[data]
path = "{directory}/prompts.jsonl"
[loop]
groups_per_step = 8
num_generations = 2
max_staleness = 1
max_completion_length = 3000
heartbeat_timeout_s = 4.0
[generation]
engine = "emulated"
max_num_seqs = 8
[training]
backend = "emulated"
max_steps = {steps}
[emulation]
time_scale = 10.0
[emulation.lengths]
source = "column"
[emulation.training]
forward_backward_s_per_token = 1e-5
optimizer_step_s = 6.0
"""


def prompts() -> str:
    rows = [
        {"prompt": f"say {phase}-{number}", "length": length}
        for phase, (steps, length) in enumerate(PHASES)
        for number in range(steps * GROUPS)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


async def test_a_worker_joins_as_lengths_grow_and_leaves_as_they_shrink_and_nothing_is_lost(
    tmp_path: Path, bootstrap_servers: str
) -> None:
    config = tmp_path / "scaling.toml"
    config.write_text(CONFIG.format(directory=tmp_path, name=NAME, steps=STEPS))
    (tmp_path / "prompts.jsonl").write_text(prompts())
    run = LocalRun.start(config, NAME, f"--kafka.bootstrap_servers={bootstrap_servers}")
    try:
        assert run.wait() == 0, run.text()[-4000:]
    finally:
        run.end()
    text = run.text()
    assert re.search(r"worker joins.*worker=worker-2|worker=worker-2.*worker joins", text), text[-4000:]
    joined = (run.directory / "logs" / "worker-2.log").read_text()
    assert "weights adopted" in joined
    assert "asked to leave" in joined
    # Of a finished run nobody trains what still runs, whether this worker is leaving, or has joined once more.
    abandoned = [line for line in joined.splitlines() if "abandoned" in line and "the run is finished" not in line]
    assert not abandoned
    assert re.search(r"worker left.*worker=worker-2|worker=worker-2.*worker left", text), text[-4000:]
    accounts = await read_accounts(bootstrap_servers, NAME)
    assert [report.step for report in accounts.steps] == list(range(1, STEPS + 1))
    assert set(accounts.trained.values()) == {1}
    assert len(accounts.trained) == STEPS * GROUPS * SAMPLES
    assert not accounts.skipped
    assert {name.rpartition("-")[2] for name in accounts.workers} == {"0", "1", "2"}
