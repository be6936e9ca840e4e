import numpy as np

from streamrl.consumers.batching.micro_batches import TrainingSample, collate
from tests.consumers.factories import sample, training_sample


def test_rows_are_right_padded_and_aligned_with_their_tokens() -> None:
    batch = collate([training_sample(0, prompt=2, tokens=3), training_sample(1, prompt=1, tokens=1, advantage=-2.0)])
    assert batch.input_ids.tolist() == [[1, 2, 10, 11, 12], [1, 10, 0, 0, 0]]
    assert batch.loss_mask.tolist() == [[0, 0, 1, 1, 1], [0, 1, 0, 0, 0]]
    assert batch.behaviour_logprobs.tolist() == [[0, 0, -1, -2, -3], [0, -1, 0, 0, 0]]
    assert batch.advantages.tolist() == [1.0, -2.0]
    assert batch.lengths.tolist() == [5, 2]
    assert [ref.offset for ref in batch.refs] == [0, 1]


def test_arrays_have_the_promised_types() -> None:
    batch = collate([training_sample(0)])
    for name, dtype in {
        "input_ids": np.int64,
        "loss_mask": np.float32,
        "behaviour_logprobs": np.float32,
        "advantages": np.float32,
        "lengths": np.int64,
        "temperatures": np.float32,
    }.items():
        assert getattr(batch, name).dtype == dtype, name


def test_padding_is_counted() -> None:
    batch = collate([training_sample(0, prompt=1, tokens=3), training_sample(1, prompt=1, tokens=1)])
    assert (batch.num_tokens, batch.input_ids.size) == (6, 8)


def test_tokens_that_are_not_to_be_trained_stay_masked() -> None:
    item = training_sample(0, prompt=1, tokens=3)
    masked = item.sample.trajectory.replace(loss_mask=np.array([1, 0, 1], dtype="<u1"))
    sample = type(item.sample)(masked, item.sample.ref, 0.0)
    assert collate([type(item)(sample, 1.0)]).loss_mask.tolist() == [[0, 1, 0, 1]]


def test_each_row_keeps_its_own_temperature_and_place() -> None:
    items = []
    for index, temperature in enumerate((0.5, 1.0, 2.0)):
        found = sample("d/0/0", index, of=3, offset=10 + index, tokens=3 - index, temperature=temperature)
        items.append(TrainingSample(found, float(index)))
    batch = collate(items[::-1])
    assert batch.temperatures.tolist() == [2.0, 1.0, 0.5]
    assert batch.advantages.tolist() == [2.0, 1.0, 0.0]
    assert [(ref.trajectory_id, ref.offset) for ref in batch.refs] == [
        ("d/0/0/2", 12),
        ("d/0/0/1", 11),
        ("d/0/0/0", 10),
    ]
