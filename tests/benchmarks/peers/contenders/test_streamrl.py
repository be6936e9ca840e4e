"""What StreamRL is told, against the plan that everybody has."""

import sys
import time
from pathlib import Path

import pytest

from benchmarks.commands import launch
from benchmarks.peers.contenders.plan import Plan
from benchmarks.peers.contenders.streamrl import TUNED, settings
from streamrl.settings.loading import validated
from tests.progress import calm_s


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(tmp_path / "policy", tmp_path / "prompts.jsonl", tmp_path / "out", seed=3, cores=(0,), limit_s=1.0)


@pytest.mark.parametrize("variant", TUNED)
def test_every_variant_has_valid_settings_with_the_common_hyper_parameters(plan: Plan, variant: str) -> None:
    tree = validated(settings(variant, plan, {}))
    same = plan.hyperparameters
    assert tree.loop.mode == variant.partition(",")[0]
    assert (tree.loop.groups_per_step, tree.loop.num_generations) == (same.groups_per_step, same.num_generations)
    assert tree.training.learning_rate == same.learning_rate
    assert tree.algorithm.clip_range == (1 - same.epsilon, 1 + same.epsilon_high)
    assert tree.loop.max_completion_length == same.max_completion_length


def test_overrides_win_and_leave_the_rest_of_a_section(plan: Plan) -> None:
    tree = settings("trajectory_async", plan, {"generation": {"max_num_seqs": 7}})
    assert tree["generation"]["max_num_seqs"] == 7
    assert tree["generation"]["threads"] == TUNED["trajectory_async"]["generation"]["threads"]


@pytest.mark.processes
def test_a_command_that_takes_too_long_is_ended_with_all_it_started(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for limit_s in (0.3, 3.0, 30.0):  # on a busy machine the shell may not have started its child within the shortest
        began = calm_s()
        launched = launch(["sh", "-c", "sleep 60 & echo $! ; sleep 60"], {}, (0,), limit_s, log)
        assert launched.exit_code is None
        assert calm_s() - began < limit_s + 5
        if log.read_text().strip():
            break
    sleeper = Path("/proc") / str(int(log.read_text())) / "stat"
    began = calm_s()
    while sleeper.exists() and ") Z" not in sleeper.read_text():
        assert calm_s() - began < 10
        time.sleep(0.01)


@pytest.mark.processes
def test_the_processor_time_of_processes_that_nobody_waits_for_counts(tmp_path: Path) -> None:
    busy = "import time\nend = time.process_time() + 1.5\nwhile time.process_time() < end: pass"
    script = f"trap '' CHLD; {sys.executable} -c '{busy}' & sleep 60"
    launched = launch(["sh", "-c", script], {}, (0,), 5.0, tmp_path / "log")
    assert launched.cpu_seconds > 0.5
