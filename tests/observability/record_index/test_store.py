from pathlib import Path

import pytest

from streamrl.bus.port import TopicPartition
from streamrl.observability.record_index.entries import Kind, NamedRow, Rows, StepKind, StepRow, WeightsRow
from streamrl.observability.record_index.store import Place, ReadPosition, RecordIndex
from streamrl.schemas.identifiers import PolicyVersion

TP = TopicPartition("r.trajectories", 0)


def rows(*names: str) -> Rows:
    return Rows(named=[NamedRow(name, Kind.TRAJECTORY, 0, 0, offset) for offset, name in enumerate(names)])


def test_rows_and_positions_move_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "i.sqlite"
    with RecordIndex(path) as index:
        assert index.add(rows("a", "b"), {}, {TP: ReadPosition(2, 1, 7)})

        def killed(_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(index, "_write_weights", killed)
        more = rows("c", "d", "e")
        more.weights.append(WeightsRow("w", 1, 1, 0.0))
        with pytest.raises(KeyboardInterrupt):
            index.add(more, index.reading(), {TP: ReadPosition(5, 4, 8)})
    with RecordIndex(path) as index:
        assert index.reading() == {TP: ReadPosition(2, 1, 7)}
        assert index.places("b", Kind.TRAJECTORY) == [Place(0, 0, 1)]
        assert index.places("c", Kind.TRAJECTORY) == []


def test_two_writers_do_not_disturb_each_other(tmp_path: Path) -> None:
    with RecordIndex(tmp_path / "i.sqlite") as one, RecordIndex(tmp_path / "i.sqlite") as other:
        assert one.add(rows("a"), {}, {TP: ReadPosition(1)})
        assert not other.add(rows("b"), {}, {TP: ReadPosition(9)})
        assert other.places("b", Kind.TRAJECTORY) == []
        assert other.add(rows("a", "b"), other.reading(), {TP: ReadPosition(2)})
        assert one.places("a", Kind.TRAJECTORY) == [Place(0, 0, 0)]
        assert one.reading() == {TP: ReadPosition(2)}


def test_queries_over_all_steps_are_cached_until_any_process_writes(tmp_path: Path) -> None:
    def step(offset: int, lineage: int, number: int) -> Rows:
        kind = StepKind.STEP if number else StepKind.LINEAGE_START
        return Rows(steps=[StepRow(offset, "grpo", kind, lineage, number, number, None, None, 0, False, 0)])

    def begins() -> list[int]:
        return [report.offset for report in one.first_reports("grpo")]

    with RecordIndex(tmp_path / "i.sqlite") as one, RecordIndex(tmp_path / "i.sqlite") as other:
        scans: list[str] = []
        one._database.set_trace_callback(lambda query: scans.append(query) if "FROM steps" in query else None)
        one.add(step(0, 1, 0), {}, {})
        for _ in range(3):
            assert (begins(), one.last_steps("grpo")) == ([0], {})
        assert len(scans) == 2
        # By this process, then by another.
        one.add(step(1, 1, 1), {}, {})
        assert (begins(), one.last_steps("grpo")) == ([0], {1: 1})
        other.add(step(2, 2, 0), {}, {})
        other.add(step(3, 2, 2), {}, {})
        for _ in range(3):
            assert (begins(), one.last_steps("grpo")) == ([0, 2], {1: 1, 2: 2})
        assert len(scans) == 6
        one.clear()
        assert (begins(), one.last_steps("grpo")) == ([], {})


@pytest.mark.parametrize("content", [b"no database at all, but long enough to be read as one" * 40, b""])
def test_a_damaged_file_is_rebuilt(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "i.sqlite"
    path.write_bytes(content)
    with RecordIndex(path) as index:
        assert index.reading() == {}
        assert index.add(rows("a"), {}, {TP: ReadPosition(1)})


def test_a_file_that_is_damaged_later_is_cleared(tmp_path: Path) -> None:
    path = tmp_path / "i.sqlite"
    with RecordIndex(path) as index:
        index.add(rows(*(f"group/{number}" for number in range(5000))), {}, {TP: ReadPosition(5000)})
    content = bytearray(path.read_bytes())
    content[100:] = b"\x5a" * (len(content) - 100)
    path.write_bytes(content)
    with RecordIndex(path) as index:
        index.clear()
        assert index.reading() == {}


def test_an_index_of_another_format_is_built_again(tmp_path: Path) -> None:
    path = tmp_path / "i.sqlite"
    with RecordIndex(path) as index:
        index.add(rows("a"), {}, {TP: ReadPosition(1)})
        index._database.execute("PRAGMA user_version = 999")
    with RecordIndex(path) as index:
        assert index.reading() == {}


def test_groups_of_a_prompt_are_found_by_its_name() -> None:
    index = RecordIndex(None)
    index.add(rows("d/1/0", "d/1/1", "d/10/0", "d/1", "e/1/0"), {}, {})
    assert index.groups_under("d/1", 10) == ["d/1/0", "d/1/1"]
    assert index.groups_under("d/1", 1) == ["d/1/0"]
    assert index.groups_under("d", 10) == ["d/1", "d/1/0", "d/1/1", "d/10/0"]


def test_weights_are_known_by_their_first_sign() -> None:
    index = RecordIndex(None)
    beats = [WeightsRow("w1", 1, 1, 1.0), WeightsRow("w2", 1, 3, 2.0), WeightsRow("w1", 1, 2, 3.0)]
    index.add(Rows(weights=beats), {}, {})
    index.add(Rows(weights=[WeightsRow("w3", 2, 1, 4.0), WeightsRow("w3", 1, 9, 5.0)]), {}, {})
    assert index.first_weights(PolicyVersion(1, 2), in_use=True) == WeightsRow("w2", 1, 3, 2.0)
    assert index.first_weights(PolicyVersion(1, 4), in_use=True) == WeightsRow("w3", 2, 1, 4.0)
    assert index.first_weights(PolicyVersion(2, 2), in_use=True) is None
    assert index.first_weights(PolicyVersion(1, 1), in_use=False) is None


def test_a_group_of_any_size_costs_few_bytes(tmp_path: Path) -> None:
    path = tmp_path / "i.sqlite"
    with RecordIndex(path) as index:
        named = [
            NamedRow(f"arithmetic/{group}/0", Kind.TRAJECTORY, sample, group % 8, group + sample)
            for group in range(5000)
            for sample in range(8)
        ]
        index.add(Rows(named=named), {}, {TP: ReadPosition(1)})
    assert path.stat().st_size / len(named) < 40
