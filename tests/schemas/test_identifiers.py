import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.schemas.identifiers import (
    WORK_ORDER_PARTITIONS,
    PolicyVersion,
    group_id_of,
    is_plain_name,
    make_group_id,
    make_prompt_id,
    make_trajectory_id,
    partition_of_worker,
)


def test_weights_of_a_later_lineage_win_whatever_their_number() -> None:
    assert PolicyVersion(2, 101) > PolicyVersion(1, 105)
    assert PolicyVersion(2, 102) > PolicyVersion(2, 101)


@given(lineage=st.integers(0, 10**9 - 1), number=st.integers(0, 10**12 - 1))
def test_a_version_survives_its_text(lineage: int, number: int) -> None:
    version = PolicyVersion(lineage, number)
    assert PolicyVersion.parse(str(version)) == version


@pytest.mark.parametrize("text", ["", "1", "1-", "-1-2", "1-2-3", "a-1", "1-2\n", " 1-2", "1_0-2", "1-" + "9" * 13])
def test_text_that_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="1-20"):
        PolicyVersion.parse(text)


@pytest.mark.parametrize("name", ["run", "run-1", "a.b_c-3", "0", "x" * 64])
def test_plain_names_are_plain(name: str) -> None:
    assert is_plain_name(name)


@pytest.mark.parametrize("name", ["", "Run", "a/b", "..", "a..b", "x" * 65, "a b", "ä", "run\n", "a\x00"])
def test_names_that_could_be_paths_or_surprise_a_shell_are_not_plain(name: str) -> None:
    assert not is_plain_name(name)


def test_a_retry_of_the_same_work_gets_the_same_name() -> None:
    group = make_group_id(make_prompt_id("gsm8k", 7), 0)
    assert make_trajectory_id(group, 3) == make_trajectory_id(make_group_id(make_prompt_id("gsm8k", 7), 0), 3)
    names = {
        make_trajectory_id(make_group_id(make_prompt_id("d", i), p), s)
        for i in range(3)
        for p in range(3)
        for s in range(3)
    }
    assert len(names) == 27


def test_dispatcher_and_workers_agree_on_a_partition_in_every_process() -> None:
    assert {name: partition_of_worker(name) for name in ("worker-0", "worker-1", "w")} == {
        "worker-0": 51,
        "worker-1": 50,
        "w": 17,
    }


def test_a_trajectory_names_its_group() -> None:
    group = make_group_id(make_prompt_id("gsm8k", 7), 2)
    assert group_id_of(make_trajectory_id(group, 5)) == group
    assert group_id_of("none of ours") == ""


@given(st.text(max_size=64))
def test_a_worker_reads_a_partition_of_the_work_orders(worker_id: str) -> None:
    assert 0 <= partition_of_worker(worker_id) < WORK_ORDER_PARTITIONS


def test_many_workers_spread_over_the_partitions() -> None:
    assert len({partition_of_worker(f"worker-{n}") for n in range(64)}) > 32
