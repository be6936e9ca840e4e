"""A trajectory's columns: of a session's turns, and of a completion that was asked for alone."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from streamrl.bus.port import Outgoing, Record
from streamrl.inspection.trajectory_columns import FACTS, Trained, facts_of, readable_columns, trained_in
from streamrl.schemas.messages import Message
from tests.schemas.examples import examples, trajectory

TURNS = [{"start": 0, "end": 2, "rewards": [("feedback", 0.5)]}, {"start": 4, "end": 5, "rewards": []}]


def record(message: Message) -> Record:
    sent = Outgoing.of("r.trajectories", message, key="g", partition=0)
    return Record(sent.topic, 0, 0, sent.key, sent.value, sent.headers, 0.0)


def test_a_session_s_turns_are_columns() -> None:
    of_session = examples()["trajectory-session"]
    rows = [facts_of(one, (0, 0), None, None) for one in (of_session, trajectory())]  # type: ignore[arg-type]
    table = pa.Table.from_pylist(rows, FACTS)
    assert table["session"].to_pylist() == ["agent/7", None]
    assert table["turns"].to_pylist() == [TURNS, []]


def test_an_export_s_columns_have_them_through_parquet(tmp_path: Path) -> None:
    damaged = record(trajectory())._replace(value=b"none")
    columns = readable_columns([record(examples()["trajectory-session"]), damaged], {(0, 0): Trained(3, 0.5)})
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    read = pq.read_table(tmp_path / "x.parquet")
    assert read["session"].to_pylist() == ["agent/7", None]
    assert read["turns"].to_pylist() == [TURNS, None]
    assert read["advantage"].to_pylist() == [0.5, None]


def test_trained_trajectories_have_the_advantages_of_their_report() -> None:
    report, older = examples()["step-report-credited"], examples()["step-report"]
    assert trained_in([report]) == {(1, 10): Trained(4, 0.5), (1, 11): Trained(4, -0.25)}  # type: ignore[list-item]
    assert trained_in([older]) == {(1, 10): Trained(4, None), (1, 11): Trained(4, None)}  # type: ignore[list-item]
