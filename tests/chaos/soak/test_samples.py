"""Slopes are of the longest life of a role, after its warm-up."""

import os

import pytest

from tests.chaos.soak.samples import MIB, Sample, look_at, slopes


def life(role: str, pid: int, begin: int, end: int, growth: float) -> list[Sample]:
    """``growth`` in MiB per hour, after a steep first minute."""
    return [
        Sample(role, pid, float(at), int((50 + min(60, at - begin) + growth * at / 3600) * MIB), 10)
        for at in range(begin, end, 5)
    ]


def test_a_slope_is_that_of_the_longest_life_without_its_first_minute() -> None:
    samples = life("trainer", 1, 0, 100, 900.0) + life("trainer", 2, 100, 1900, 36.0) + life("relay", 3, 0, 20, 0.0)
    (found,) = slopes(samples)
    assert found.role == "trainer"
    assert found.memory_mib_per_h == pytest.approx(36.0, abs=0.1)
    assert found.descriptors_per_h == 0.0


def test_a_process_that_is_gone_gives_no_sample() -> None:
    assert look_at("x", 2**22 + 1, 0.0) is None
    here = look_at("x", os.getpid(), 1.0)
    assert here is not None
    assert here.memory > MIB
    assert here.descriptors > 2
