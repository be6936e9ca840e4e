import json
import subprocess
import sys

import pytest

from inspection.diagnostics.connect import Attachment
from inspection.diagnostics.tail import named_topic
from schemas.errors import UserError
from schemas.topics import TRAJECTORIES

pytestmark = [pytest.mark.kafka, pytest.mark.asyncio(loop_scope="session")]


def tail(attachment: Attachment, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "streamrl.cli.app", "tail", *arguments]
    named = ["--bootstrap-servers", attachment.address, "--run", attachment.run]
    return subprocess.run([*command, *named], capture_output=True, text=True, check=False, timeout=60)


async def test_a_topic_is_named_shortly_or_in_full(surveyed: Attachment) -> None:
    assert await named_topic(surveyed, "trajectories") == ("surveyed.trajectories", TRAJECTORIES)
    unnamed = Attachment(surveyed.kafka, "")
    assert await named_topic(unnamed, "surveyed.trajectories") == ("surveyed.trajectories", TRAJECTORIES)
    with pytest.raises(UserError, match="did you mean trajectories"):
        await named_topic(surveyed, "trajektories")


async def test_records_are_filtered_and_those_that_do_not_decode_are_shown(surveyed: Attachment) -> None:
    done = tail(
        surveyed, "trajectories", "--from", "beginning", "--filter", "worker_id=worker-1 and length>30", "--json"
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0
    assert sorted(len(row["message"]["token_ids"]) for row in rows) == [32, 34, 36, 38, 40, 42, 44]
    done = tail(surveyed, "trajectories", "--from", "1h", "--filter", "not problem=none", "--partition", "3")
    assert done.returncode == 0
    assert "undecodable" in done.stdout
    assert "UnknownSchema" in done.stdout
    assert done.stderr == ""


async def test_a_mistake_ends_in_one_line_and_code_two(surveyed: Attachment) -> None:
    for arguments in (["trajectories", "--filter", "lenght>5"], ["trajectories", "--partition", "99"], ["nothing"]):
        done = tail(surveyed, *arguments)
        assert done.returncode == 2
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1
        assert done.stderr.startswith("error: expected")
