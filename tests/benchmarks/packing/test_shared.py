import pytest

from benchmarks.packing import shared


def test_a_row_has_the_speed_of_a_group_and_its_ideal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "LAYERS", 1)
    (row,) = shared.shared_rows(1, lengths=(8,), groups=(2,))
    assert (row["prompt"], row["completion"], row["group"], row["ideal"]) == (8, 8, 2, 1.33)
    assert row["of_ideal"] == pytest.approx(row["speedup"] / (4 / 3), abs=0.01)
    assert row["skipped"] is None


def test_cells_that_take_too_long_are_skipped_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "LAYERS", 1)
    rows = list(shared.shared_rows(1, lengths=(8, 16), groups=(2, 4), limit_s=0.0))
    assert len(rows) == 8
    assert all(row["speedup"] is row["of_ideal"] is None and "more than 0 s" in row["skipped"] for row in rows)
