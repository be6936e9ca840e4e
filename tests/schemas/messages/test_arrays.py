import numpy as np
import pytest
from pydantic import ValidationError

from streamrl.schemas.messages import Message
from streamrl.schemas.trajectories import TokenChunk, Trajectory
from tests.schemas.examples import examples, trajectory


@pytest.mark.parametrize("field", ["token_ids", "prompt_token_ids", "logprobs", "loss_mask"])
@pytest.mark.parametrize("dtype", ["<i8", "<f8", ">i4", ">f4", "bool"])
def test_an_array_of_another_type_is_refused_not_converted(field: str, dtype: str) -> None:
    with pytest.raises(ValidationError, match="expected a 1-d array"):
        trajectory(5, **{field: np.ones(5, np.dtype(dtype))})


def test_an_array_of_two_dimensions_is_refused() -> None:
    with pytest.raises(ValidationError, match="2-d"):
        trajectory(4, token_ids=np.ones((2, 2), np.int32))


def test_a_sequence_of_numbers_becomes_an_array() -> None:
    message = trajectory(3, token_ids=[1, 2, 3], logprobs=(-1.0, -2.0, 0.0), loss_mask=[0, 1, 1])
    assert message.token_ids.dtype == np.int32
    assert message.logprobs.dtype == np.float32
    assert message.loss_mask.dtype == np.uint8


def test_array_fields_are_listed_in_the_order_in_which_they_travel() -> None:
    assert list(Trajectory.array_fields()) == ["prompt_token_ids", "token_ids", "logprobs", "loss_mask"]
    assert list(TokenChunk.array_fields()) == ["token_ids", "logprobs"]


def test_messages_with_arrays_compare_by_value() -> None:
    assert trajectory(5) == trajectory(5)
    assert trajectory(5) != trajectory(5, logprobs=np.zeros(5, np.float32))
    assert trajectory(5) != trajectory(6)


@pytest.mark.parametrize("name", examples())
def test_messages_are_frozen(name: str) -> None:
    message: Message = examples()[name]
    with pytest.raises(ValidationError, match="frozen"):
        setattr(message, next(iter(type(message).model_fields)), None)


def test_a_replaced_field_is_validated() -> None:
    message = trajectory(5)
    assert message.replace(attempt=4).attempt == 4
    with pytest.raises(ValidationError):
        message.replace(attempt=-1)
    with pytest.raises(ValidationError, match="one length"):
        message.replace(loss_mask=np.zeros(1, np.uint8))


def test_oldest_and_newest_version_come_from_the_spans() -> None:
    message = trajectory(5)
    assert (str(message.oldest_version), str(message.newest_version)) == ("1-20", "1-21")
    empty = trajectory(0)
    assert str(empty.oldest_version) == str(empty.newest_version) == "1-19"


def test_as_json_an_array_is_a_list() -> None:
    assert '"token_ids":[0,1000,2000]' in trajectory(3).model_dump_json()
