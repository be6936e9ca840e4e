import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from streamrl.schemas.settings import LoopSettings


def test_an_unknown_key_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="groups_per_stepp"):
        LoopSettings.model_validate({"groups_per_stepp": 3})


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        LoopSettings().top_k = 3  # type: ignore[misc]


@pytest.mark.parametrize("boundaries", [(256, 64), (64, 64), (1, 3, 2)])
def test_bucket_boundaries_must_ascend(boundaries: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError, match="ascending"):
        LoopSettings(bucket_boundaries=boundaries)


@pytest.mark.parametrize(("length", "bucket"), [(0, 0), (63, 0), (64, 1), (255, 1), (256, 2), (1024, 3), (10**6, 3)])
def test_the_bucket_of_a_length_counts_the_boundaries_at_or_below_it(length: int, bucket: int) -> None:
    assert LoopSettings().bucket_of(length) == bucket


@given(
    boundaries=st.lists(st.integers(1, 10_000), max_size=6, unique=True).map(sorted).map(tuple),
    length=st.integers(0, 20_000),
    position=st.integers(0, 10**9),
)
def test_every_group_has_a_partition_of_the_topic(boundaries: tuple[int, ...], length: int, position: int) -> None:
    loop = LoopSettings(bucket_boundaries=boundaries)
    partition = loop.partition_of(loop.bucket_of(length), position)
    assert 0 <= partition < loop.trajectory_partitions
    assert partition // loop.shards == loop.bucket_of(length)


def test_groups_in_flight_follow_from_the_staleness_bound() -> None:
    assert LoopSettings(groups_per_step=4, max_staleness=2).max_groups_in_flight == 12
    assert LoopSettings(groups_per_step=4, max_staleness=0).max_groups_in_flight == 4
