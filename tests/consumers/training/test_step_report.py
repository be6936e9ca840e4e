from dataclasses import replace

from streamrl.consumers.algorithms.advantages import ModelLimits, credit_group
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.batching.micro_batches import Group, Sample
from streamrl.consumers.training.step_report import (
    PROBLEM_LIMIT,
    GatheredStep,
    PublishedWeights,
    refused_step,
    step_report,
)
from streamrl.schemas.codec import decode, encode, headers_of
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import MAX_ADVANTAGES, RecordRef
from tests.consumers.training.factories import make_micro_batch, make_trajectory


def gathered() -> GatheredStep:
    """Two samples of three are in the gradient."""
    step = GatheredStep(PolicyVersion(1, 4))
    samples = tuple(
        Sample(make_trajectory("p/0/0", i, tokens=tokens), RecordRef(f"p/0/0/{i}", 0, i), float(i))
        for i, tokens in enumerate(([4], [], [5]))
    )
    found = Group("p/0/0", 0.0, samples)
    step.add_group(found, credit_group(found, AlgorithmSettings(), ModelLimits(vocabulary=20, positions=20)))
    step.add_trained(make_micro_batch(2), 1)
    return step


def test_a_report_names_what_was_trained_and_what_was_left_out() -> None:
    step = gathered()
    weights = PublishedWeights(PolicyVersion(1, 5), None, {"w": "00"}, is_last=True)
    report = step_report("grpo", weights, step, {"loss": 1.0}, 7, 0.0)
    assert (report.step, report.version, report.finished) == (5, PolicyVersion(1, 5), True)
    assert report.micro_batches == tuple(step.micro_batches)
    assert report.left_out == (RecordRef("p/0/0/1", 0, 1),)
    (batch,) = step.batches
    assert report.advantages == tuple(batch.advantages.tolist())
    assert report.advantage_of == {
        (ref.partition, ref.offset): value for ref, value in zip(batch.refs, batch.advantages.tolist(), strict=True)
    }
    assert (report.digests, report.prompt_cursor) == ({"w": "00"}, 7)


def test_a_very_large_step_is_reported_without_advantages_within_the_limits_of_the_wire() -> None:
    step, weights = GatheredStep(PolicyVersion(1, 4)), PublishedWeights(PolicyVersion(1, 5), None, {}, is_last=True)
    batch = make_micro_batch(2)
    for number in range(MAX_ADVANTAGES // 2):
        step.add_trained(replace(batch, refs=tuple(RecordRef(f"p/{number}/0/{row}", 3, number) for row in (0, 1))), 1)
    report = step_report("grpo", weights, step, {}, 7, 0.0)
    assert len(report.advantages) == MAX_ADVANTAGES
    assert decode(encode(report), headers_of(report)) == report
    step.add_trained(batch, 1)
    assert step_report("grpo", weights, step, {}, 7, 0.0).advantages == ()


def test_a_refused_step_is_the_one_after_the_weights_it_was_computed_with() -> None:
    refused = refused_step("grpo", PolicyVersion(1, 4), gathered(), "x" * 9999, {"loss": float("nan"), "a": 1.0}, 0.0)
    assert (refused.step, refused.version, refused.metrics) == (5, PolicyVersion(1, 4), {"a": 1.0})
    assert refused.left_out == (RecordRef("p/0/0/1", 0, 1),)
    assert len(refused.problem) == PROBLEM_LIMIT
