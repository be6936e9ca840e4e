import json

import pytest

from streamrl.inspection.diagnostics.connect import RunConnection
from streamrl.inspection.diagnostics.tail import named_topic
from streamrl.schemas.errors import UserError
from streamrl.schemas.topics import TRAJECTORIES
from tests.command import Ended, ended


def tail(connection: RunConnection, *arguments: str) -> Ended:
    return ended("tail", *arguments, "--bootstrap-servers", connection.address, "--run", connection.run)


@pytest.mark.asyncio(loop_scope="session")
async def test_a_topic_is_named_shortly_or_in_full(living_run: RunConnection) -> None:
    full = living_run.name_of(TRAJECTORIES)
    assert await named_topic(living_run, "trajectories") == (full, TRAJECTORIES)
    assert await named_topic(RunConnection(living_run.kafka, ""), full) == (full, TRAJECTORIES)
    with pytest.raises(UserError, match="did you mean trajectories"):
        await named_topic(living_run, "trajektories")


def test_records_are_filtered_and_those_that_do_not_decode_are_shown(living_run: RunConnection) -> None:
    done = tail(
        living_run, "trajectories", "--from", "beginning", "--filter", "worker_id=worker-1 and length>30", "--json"
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0
    assert sorted(len(row["message"]["token_ids"]) for row in rows) == [32, 34, 36, 38, 40, 42, 44]
    done = tail(living_run, "trajectories", "--from", "1h", "--filter", "not problem=none", "--partition", "3")
    assert done.returncode == 0
    assert "undecodable" in done.stdout
    assert "UnknownSchema" in done.stdout
    assert done.stderr == ""


def test_a_mistake_ends_in_one_line_and_code_two(living_run: RunConnection) -> None:
    for arguments in (["trajectories", "--filter", "lenght>5"], ["trajectories", "--partition", "99"], ["nothing"]):
        done = tail(living_run, *arguments)
        assert done.returncode == 2
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1
        assert done.stderr.startswith("error: expected")


def test_that_nothing_is_shown_is_said(living_run: RunConnection) -> None:
    done = tail(living_run, "trajectories", "--filter", "length>1000000")
    assert (done.returncode, done.stdout) == (0, "")
    topic = living_run.name_of(TRAJECTORIES)
    assert done.stderr == f"no record matches in {topic} from -10 on; `--from beginning` reads all records\n"
    done = tail(living_run, "trajectories", "--partition", "99")
    assert done.stderr == f"error: expected a partition from 0 to 7 of topic {topic}, got 99\n"
