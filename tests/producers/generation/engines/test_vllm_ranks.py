"""vLLM over two ranks, here processes on a CPU: new weights reach both in flight, and both end with their worker."""

import json
import subprocess
import sys
import time

import psutil
import pytest

from schemas.identifiers import PolicyVersion
from tests.producers.generation.engines.conftest import MakeVersion
from tests.producers.generation.engines.replay import Sampled, load, mixed_forward, worst

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROGRAM = "tests.producers.generation.engines.two_ranks"
GONE_WITHIN_S = 2.0


def test_weights_reach_every_rank_in_flight_and_no_rank_outlives_a_killed_worker(no_eos_version: MakeVersion) -> None:
    directories = [no_eos_version(number) for number in (1, 2, 3)]
    with subprocess.Popen(
        [sys.executable, "-m", PROGRAM, *map(str, directories)], stdout=subprocess.PIPE, text=True
    ) as worker:
        try:
            assert worker.stdout is not None
            told = json.loads(worker.stdout.readline())
            ranks = psutil.Process(worker.pid).children(recursive=True)
            assert len(ranks) >= 2
        finally:
            worker.kill()
    models = {PolicyVersion(1, number): load(directory) for number, directory in enumerate(directories)}
    results = [Sampled(**one | {"versions": [PolicyVersion(1, number) for number in one["versions"]]}) for one in told]
    assert [version.number for version, _, _ in results[0].spans()] == [0, 1, 2]
    for result in results:
        assert worst(result, mixed_forward(models, result)) < 1e-3
        # As sharp a test as the versions are apart: with the first weights throughout it does not hold.
        assert worst(result, mixed_forward(dict.fromkeys(models, models[PolicyVersion(1, 0)]), result)) > 0.05
    time.sleep(GONE_WITHIN_S)
    assert not [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]
