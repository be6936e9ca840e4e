import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.producers.lengths.buckets import FILE, Buckets, equal_tokens


def _fitted(folder: Path | None = None, at: float = 1000.0) -> Buckets:
    return Buckets((64, 256, 1024), fit_every=100, fit_after=50, window=1000, folder=folder, clock=lambda: at)


def _feed(buckets: Buckets, count: int, scale: float = 1.0, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    lengths = [max(1, round(scale * rng.lognormvariate(4, 1))) for _ in range(count)]
    for length in lengths:
        buckets.observe(length)
    return lengths


def test_fixed_boundaries_stay_and_have_version_zero() -> None:
    buckets = Buckets((64, 256))
    _feed(buckets, 1000)
    assert (buckets.version, buckets.boundaries.lengths, buckets.are_fitted) == (0, (64, 256), False)
    assert [buckets.of(length) for length in (1, 63, 64, 255, 256, 9999)] == [0, 0, 1, 1, 2, 2]


def test_fitted_boundaries_give_every_bucket_alike_many_tokens() -> None:
    buckets = _fitted()
    lengths = _feed(buckets, 1050)[50:]
    tokens = [sum(length for length in lengths if buckets.of(length) == bucket) for bucket in range(4)]
    assert max(tokens) / sum(tokens) < 0.3
    assert min(tokens) / sum(tokens) > 0.2


@given(st.lists(st.integers(1, 10_000), max_size=60), st.integers(0, 6))
def test_the_number_of_buckets_never_changes(lengths: list[int], count: int) -> None:
    boundaries = equal_tokens(sorted(lengths), count)
    assert len(boundaries) == count
    assert list(boundaries) == sorted(set(boundaries))
    assert all(boundary >= 1 for boundary in boundaries)


def test_a_version_names_one_set_of_boundaries() -> None:
    """The version rises with every change, and with nothing else; a restart that kept nothing begins above."""
    buckets, seen = _fitted(), dict[int, tuple[int, ...]]()
    for growth in range(6):
        _feed(buckets, 300, scale=2.0**growth, seed=growth)
        assert seen.setdefault(buckets.version, buckets.boundaries.lengths) == buckets.boundaries.lengths
        assert buckets.version == max(seen)
    assert len(seen) > 3
    again = _fitted(at=2000.0)
    _feed(again, 60)
    assert again.version >= 2000 > buckets.version


def test_lengths_that_stay_alike_leave_the_boundaries_alone() -> None:
    buckets = _fitted()
    _feed(buckets, 1050)
    version = buckets.version
    _feed(buckets, 2000, seed=1)
    assert buckets.version <= version + 4


def test_a_restart_goes_on_with_the_boundaries_it_kept(tmp_path: Path) -> None:
    first = _fitted(tmp_path)
    _feed(first, 200)
    assert _fitted(tmp_path, at=5000.0).boundaries == first.boundaries
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize(
    "content", ["", "{}", '{"version": 3, "lengths": [5, 4, 9]}', '{"version": 3, "lengths": [1]}', "[1]"]
)
def test_kept_boundaries_that_cannot_be_used_are_left_aside(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    assert _fitted(tmp_path).boundaries.lengths == (64, 256, 1024)


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    buckets = _fitted(tmp_path / "file")
    _feed(buckets, 200)
    assert buckets.version > 0
