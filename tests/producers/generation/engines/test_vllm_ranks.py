"""vLLM over two ranks, or as two cores, here on a CPU: they report what is scored, and end with their worker."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from streamrl.consumers.algorithms.losses import CompletionScorer
from streamrl.schemas.identifiers import PolicyVersion
from tests.producers.generation.engines.conftest import MakeVersion
from tests.producers.generation.engines.replay import Sampled, load, mixed_forward, worst
from tests.producers.generation.engines.test_on_policy import off_by

pytestmark = pytest.mark.vllm

PROGRAM = "tests.producers.generation.engines.two_ranks"
GONE_WITHIN_S = 2.0


@pytest.mark.parametrize("size", ["tensor_parallel_size", pytest.param("data_parallel_size", marks=pytest.mark.long)])
def test_two_ranks_report_what_is_scored_take_weights_in_flight_and_do_not_outlive_a_killed_worker(
    undecided_dir: Path, no_eos_version: MakeVersion, size: str
) -> None:
    directories = [undecided_dir, *(no_eos_version(number) for number in (1, 2, 3))]
    # A killed worker leaves its temporary files behind. Names of sockets are added to this path, so it is short.
    with (
        TemporaryDirectory(ignore_cleanup_errors=True) as temporary,
        subprocess.Popen(
            [sys.executable, "-m", PROGRAM, size, *map(str, directories)],
            env=os.environ | {"TMPDIR": temporary},
            stdout=subprocess.PIPE,
            text=True,
        ) as worker,
    ):
        try:
            assert worker.stdout is not None
            truncated, told = (json.loads(worker.stdout.readline()) for _ in range(2))
            ranks = psutil.Process(worker.pid).children(recursive=True)
            assert len(ranks) >= 2
        finally:
            worker.kill()
    distance = off_by(CompletionScorer(load(undecided_dir)), _sampled(truncated), temperature=1.0)
    print(f"{size}, truncated: ratio 1 +- {distance:.1e}")
    assert distance < 2e-5
    models = {PolicyVersion(1, number): load(directory) for number, directory in enumerate(directories)}
    results = _sampled(told)
    assert [version.number for version, _, _ in results[0].spans()] == [1, 2, 3]
    for result in results:
        assert worst(result, mixed_forward(models, result)) < 1e-3
        # As sharp a test as the versions are apart: with the first weights throughout it does not hold.
        assert worst(result, mixed_forward(dict.fromkeys(models, models[PolicyVersion(1, 1)]), result)) > 0.05
    time.sleep(GONE_WITHIN_S)
    assert not [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]


def _sampled(told: list[dict[str, Any]]) -> list[Sampled]:
    return [Sampled(**one | {"versions": [PolicyVersion(1, number) for number in one["versions"]]}) for one in told]
