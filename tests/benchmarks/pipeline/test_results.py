from pathlib import Path

from benchmarks.pipeline.results import merged, read_rows, write_rows


def row(ranker: str, rate: float) -> dict[str, object]:
    return {
        "kind": "virtual",
        "workload": "a",
        "mode": "stream",
        "dispatch": "lpt",
        "ranker": ranker,
        "trajectories_per_s": rate,
    }


def test_what_is_measured_anew_replaces_its_row_in_place() -> None:
    rows = merged([row("none", 1.0), row("perfect", 2.0)], [row("none", 3.0), row("learned", 4.0)])
    assert [(one["ranker"], one["trajectories_per_s"]) for one in rows] == [
        ("none", 3.0),
        ("perfect", 2.0),
        ("learned", 4.0),
    ]


def test_rows_survive_the_file(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "none.json") == []
    write_rows(tmp_path / "rows.json", [row("none", 1.25)])
    assert read_rows(tmp_path / "rows.json") == [row("none", 1.25)]
