import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.batching.settings import BatchingSettings
from streamrl.inspection.replay.replayer import ReplayOptions
from streamrl.inspection.replay.scratch_policy import Variation
from streamrl.inspection.replay.steps import taken_step
from streamrl.schemas.errors import UserError
from streamrl.schemas.identifiers import PolicyVersion
from tests.inspection.replay.recorded_run import KEPT, Recorded, record, usual_groups

STEPS = 10
SETTINGS = {
    "dapo, some left out": AlgorithmSettings(mask_truncated_completions=True),
    "grpo with a reference": AlgorithmSettings(loss_type="grpo", beta=0.1, ratio="proximal"),
    "dr_grpo by the batch": AlgorithmSettings(loss_type="dr_grpo", scale_rewards="batch", dynamic_sampling=True),
    "rloo": AlgorithmSettings(name="rloo", importance_sampling_cap=None),
}


async def recorded(tmp_path: Path, model_path: Path, **changes: Any) -> Recorded:
    return await record(tmp_path, model_path, usual_groups(STEPS), crash_at=7, **changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Recorded:
    """One run for the tests that only look at it."""
    return asyncio.run(recorded(tmp_path_factory.mktemp("run"), model_path))


@pytest.mark.parametrize("algorithm", SETTINGS.values(), ids=SETTINGS)
async def test_every_step_of_a_run_with_a_crash_in_it_replays_bit_equal(
    tmp_path: Path, model_path: Path, algorithm: AlgorithmSettings
) -> None:
    run = await recorded(tmp_path, model_path, algorithm=algorithm)
    last = max(report.step for report in run.harness.reports())
    found = await run.replays(1, last)
    assert [each.rebuilt.verdict for each in found] == ["bit-equal"] * last
    assert last >= 8
    assert [each.rebuilt.version for each in found] == [f"1-{n}" if n <= 6 else f"2-{n}" for n in range(1, last + 1)]
    for each in found:
        assert each.rebuilt.tensors
        assert all(tensor.equal for tensor in each.rebuilt.tensors)
        assert all(pair.equal for pair in each.rebuilt.metrics)
        shares = sum(row.loss for row in each.rebuilt.rows)
        assert shares == pytest.approx(each.rebuilt.metric("loss").rebuilt, abs=1e-5)


async def test_a_float32_head_is_a_part_of_how_a_step_was_computed(tmp_path: Path, model_path: Path) -> None:
    training = KEPT.model_copy(update={"dtype": "bfloat16", "cast_lm_head_to_fp32": True})
    run = await recorded(tmp_path, model_path, algorithm=SETTINGS["grpo with a reference"], training=training)
    (found,) = await run.replays(3, 3)
    assert found.rebuilt.verdict == "bit-equal"
    assert sum(row.loss for row in found.rebuilt.rows) == pytest.approx(found.rebuilt.metric("loss").rebuilt, abs=1e-5)
    run.training = run.training.model_copy(update={"cast_lm_head_to_fp32": False})
    (otherwise,) = await run.replays(3, 3)
    assert otherwise.rebuilt.verdict != "bit-equal"


@pytest.mark.parametrize("packing", ["varlen", "shared"])
@pytest.mark.parametrize("algorithm", SETTINGS.values(), ids=SETTINGS)
async def test_packed_steps_with_the_optimizer_on_the_processor_replay_bit_equal(
    tmp_path: Path, model_path: Path, algorithm: AlgorithmSettings, packing: str
) -> None:
    training = KEPT.model_copy(update={"packing": packing, "optimizer_offload": True})
    run = await recorded(tmp_path, model_path, algorithm=algorithm, training=training)
    found = await run.replays(1, 8)
    assert [each.rebuilt.verdict for each in found] == ["bit-equal"] * 8
    run.training = run.training.model_copy(update={"optimizer_offload": False})  # which changes no bit on a processor
    assert [each.rebuilt.verdict for each in await run.replays(8, 8)] == ["bit-equal"]


async def test_a_step_is_rebuilt_from_the_nearest_checkpoint_of_its_chain(tmp_path: Path, model_path: Path) -> None:
    run = await recorded(tmp_path, model_path, algorithm=SETTINGS["dapo, some left out"])
    (second,), (eighth,) = await run.replays(2, 2), await run.replays(8, 8)
    assert (second.rebuilt.start, second.rebuilt.steps_between) == ("the initial model", 1)
    assert (eighth.rebuilt.start, eighth.rebuilt.steps_between) == ("checkpoint 1-6", 1)
    assert eighth.rebuilt.differing_between == ()
    assert eighth.rebuilt.left_out or second.rebuilt.left_out


async def test_a_step_that_a_crash_undid_is_replayed_by_its_lineage(run: Recorded) -> None:
    (undone,) = await run.replays(7, 7, lineage=1)
    assert (undone.rebuilt.version, undone.rebuilt.verdict) == ("1-7", "bit-equal")


async def test_differently_trained_weights_are_found_and_named(run: Recorded) -> None:
    otherwise = replace(run, training=run.training.model_copy(update={"learning_rate": 2e-2}))
    (found,) = await otherwise.replays(3, 3)
    assert found.rebuilt.verdict == "differs"
    assert found.rebuilt.differing_between == (1, 2)
    differing = [tensor for tensor in found.rebuilt.tensors if not tensor.equal]
    assert all(tensor.max_abs_difference for tensor in differing)
    assert differing


async def test_a_checkpoint_that_does_not_verify_gives_way_to_the_one_before(tmp_path: Path, model_path: Path) -> None:
    run = await recorded(tmp_path, model_path)
    weights = tmp_path / "checkpoints" / "step_6" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    (found,) = await run.replays(8, 8)
    assert (found.rebuilt.start, found.rebuilt.verdict) == ("checkpoint 1-3", "bit-equal")


async def test_a_what_if_is_shown_next_to_the_original_without_changing_it(run: Recorded) -> None:
    config = run.config()
    narrow = config.algorithm.model_copy(update={"epsilon": 0.01, "epsilon_high": 0.01})
    for algorithm in (narrow, AlgorithmSettings(name="rloo")):
        variation = Variation(replace(config, algorithm=algorithm), ("changed",))
        found = await run.replays(8, 10, variation=variation)
        assert [each.rebuilt.verdict for each in found] == ["bit-equal"] * 3
        what_if = found[0].what_if
        assert what_if is not None
        assert what_if.update is not None
        assert what_if.metrics["grad_norm"][0] == found[0].rebuilt.metric("grad_norm").rebuilt
        assert what_if.metrics["grad_norm"][0] != what_if.metrics["grad_norm"][1]
        assert 0.0 < what_if.update.cosine < 1.0
        assert {group.group for group in what_if.update.groups} >= {"model.layers.0", "model.layers.1"}
        assert what_if.update.movers[0].difference > 0.0


async def test_only_and_without_take_rows_out_and_leave_advantages_alone(run: Recorded) -> None:
    (plain,) = await run.replays(9, 9)
    name, *others = [row.trajectory_id for row in plain.rebuilt.rows]
    (without,) = await run.replays(9, 9, variation=Variation(run.config(), ("w",), without=frozenset({name})))
    (only,) = await run.replays(9, 9, variation=Variation(run.config(), ("o",), only=frozenset({name})))
    assert without.what_if is not None
    assert only.what_if is not None
    assert [row.trajectory_id for row in without.what_if.rows] == others
    assert [row.trajectory_id for row in only.what_if.rows] == [name]
    assert only.what_if.rows[0].advantage == plain.rebuilt.rows[0].advantage
    with pytest.raises(UserError, match="'nobody'"):
        await run.replays(9, 9, variation=Variation(run.config(), (), only=frozenset({"nobody"})))


async def test_other_batching_cuts_the_same_rows_otherwise(run: Recorded) -> None:
    variation = Variation(run.config(), ("b",), batching=BatchingSettings(token_budget=1000))
    (found,) = await run.replays(9, 9, variation=variation)
    assert found.what_if is not None
    assert found.what_if.update is not None
    assert found.what_if.update.cosine == pytest.approx(1.0, abs=1e-4)
    assert {row.trajectory_id for row in found.what_if.rows} == {row.trajectory_id for row in found.rebuilt.rows}


async def test_trajectories_that_are_gone_are_named_with_topic_and_offsets(tmp_path: Path, model_path: Path) -> None:
    run = await recorded(tmp_path, model_path)
    report = next(report for report in run.harness.reports() if report.version == PolicyVersion(2, 9))
    ref = report.micro_batches[0][0]
    log = run.harness.bus.log("r.trajectories").partitions[ref.partition]
    log[ref.offset] = log[ref.offset]._replace(offset=10_000)
    async with run.replayer() as replayer:
        steps = await replayer.log()
        with pytest.raises(UserError, match=rf"r\.trajectories.*\[{ref.partition}\]@{ref.offset}"):
            _ = [each async for each in replayer.replay(steps, [taken_step(steps, 9)], None, ReplayOptions())]


async def test_the_largest_shares_of_the_gradient_are_reported_by_trajectory(run: Recorded) -> None:
    (found,) = await run.replays(9, 9, row_gradients=True)
    norms = [row.gradient_norm for row in found.rebuilt.rows]
    assert all(norm is not None for norm in norms)
    total = sum(norm for norm in norms if norm is not None)
    assert 0.0 < found.rebuilt.metric("grad_norm").rebuilt <= total * (1 + 1e-5)
