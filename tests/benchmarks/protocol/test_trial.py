import numpy as np
import pytest

from benchmarks.protocol.__main__ import CHECKPOINT_EVERY, FEWEST_STEPS, main
from benchmarks.protocol.switched import BLOCK_STEPS, Switch
from benchmarks.protocol.trial import WARM_UP_BLOCKS, ProcessorTime, switch_pairs

STEPS = 120
COST = 1.03


def spent(phase: int, work: list[float], pace: float) -> ProcessorTime:
    """What a trainer would spend whose protocol costs three per cent while the switch is on."""
    switch = Switch(phase)
    return ProcessorTime([pace * each * (COST if switch.is_on(step) else 1) for step, each in enumerate(work, 1)], [])


def test_neither_a_steps_work_nor_a_runs_pace_is_taken_for_a_cost() -> None:
    work = list(np.random.default_rng(0).lognormal(0, 0.5, STEPS))
    pairs = switch_pairs(spent(0, work, pace=1.0), spent(1, work, pace=1.4))
    assert len(pairs) == (STEPS // BLOCK_STEPS - WARM_UP_BLOCKS) // 2
    assert [pair.cost for pair in pairs] == pytest.approx([COST - 1] * len(pairs))


def test_all_checkpoints_of_a_run_are_of_one_kind() -> None:
    for phase in (0, 1):
        kinds = {Switch(phase).is_on(step) for step in range(CHECKPOINT_EVERY, 10 * CHECKPOINT_EVERY, CHECKPOINT_EVERY)}
        assert kinds == {phase == 0}


def test_a_checkpoint_is_counted_by_itself() -> None:
    found = ProcessorTime.of([1.0, 2.0, 3.5, 4.5], [0.0, 0.0001, 0.5, 0.0])
    assert found.steps == pytest.approx([0.0, 0.9999, 1.0, 1.0])
    assert found.checkpoints == [0.5]


def test_too_few_steps_are_refused_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--steps", str(FEWEST_STEPS - 1)])
    assert ended.value.code == 2
    assert f"expected --steps of {FEWEST_STEPS} or more" in capsys.readouterr().err
    for steps, pairs in ((FEWEST_STEPS, 2), (FEWEST_STEPS - 1, 1)):
        run = ProcessorTime([1.0] * (steps - 1), [])  # a trainer's first step is not timed
        assert len(switch_pairs(run, run)) == pairs
