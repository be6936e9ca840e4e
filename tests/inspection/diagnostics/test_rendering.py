import json

import pytest

from streamrl.bus.port import Record
from streamrl.inspection.diagnostics.fields import json_of, line_of, shown_record
from streamrl.schemas.codec import encode, headers_of
from streamrl.schemas.topics import DEAD_LETTERS
from tests.schemas.examples import examples, trajectory


@pytest.mark.parametrize("name", examples())
def test_every_kind_of_message_is_one_readable_line_and_valid_json(name: str) -> None:
    message = examples()[name]
    each = shown_record(Record("run.t", 1, 2, "k", encode(message), headers_of(message), 1000.0), None)
    line = line_of(each)
    assert "1@2" in line
    assert "\n" not in line
    assert "undecodable" not in line
    assert json.loads(json.dumps(json_of(each)))["schema"] == message.SCHEMA


def test_arrays_are_whole_in_json() -> None:
    message = trajectory(100)
    found = json_of(shown_record(Record("run.t", 1, 2, "k", encode(message), headers_of(message), 1000.0), None))
    assert found["message"]["token_ids"] == message.token_ids.tolist()


def test_records_cannot_control_the_terminal() -> None:
    message = trajectory(4, completion_text="\x1b[2J\nred", worker_id="a\r\x07b")
    line = line_of(shown_record(Record("run.t", 0, 0, "k", encode(message), headers_of(message), 1000.0), None))
    assert line.isprintable()
    stranger = Record("run.t", 0, 0, "k\x1b[31m", b"\x00", (("sch\x1b", b"\xff\x1b"),), 1000.0)
    assert line_of(shown_record(stranger, None)).isprintable()
    assert line_of(shown_record(stranger, DEAD_LETTERS)).isprintable()
    json.dumps(json_of(shown_record(stranger, DEAD_LETTERS)))
