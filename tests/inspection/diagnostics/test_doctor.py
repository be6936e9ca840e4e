import asyncio
import json
import os
import re
import time
from pathlib import Path

import pytest

from streamrl.bus.embedded.node import free_ports
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.kafka.topic_admin import apply_topics
from streamrl.bus.port import Outgoing
from streamrl.inspection.diagnostics.checks import (
    Finding,
    check_clocks,
    check_cluster,
    check_codecs,
    check_disk,
    check_engine,
    exit_code,
    fail,
    ok,
    start_engine_probe,
    warn,
)
from streamrl.inspection.diagnostics.connect import RunConnection
from streamrl.inspection.diagnostics.doctor import run_doctor
from streamrl.schemas.topics import HEARTBEATS
from tests.contract.topics import set_configs
from tests.progress import patience
from tests.schemas.examples import examples


def test_only_a_failure_ends_with_code_two() -> None:
    assert exit_code([ok("a", "b"), warn("a", "b", "c")]) == 0
    assert exit_code([ok("a", "b"), fail("a", "b", "c")]) == 2
    assert "→ c" in fail("a", "b", "c").line


def test_all_codecs_work_here() -> None:
    assert [each.level for each in check_codecs("lz4")] == ["ok"]


def test_a_directory_without_room_or_right_to_write_fails(tmp_path: Path) -> None:
    (fine,) = check_disk({"runs": tmp_path / "not" / "yet"})
    assert fine.level in ("ok", "warn")
    if os.getuid() != 0:
        tmp_path.chmod(0o500)
        assert next(iter(check_disk({"runs": tmp_path}))).level == "fail"


@pytest.mark.processes
def test_an_engine_that_cannot_be_imported_fails_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.inspection.diagnostics.checks.ENGINE_LIBRARIES", {"vllm": ("no_such_library",)})
    (found,) = check_engine("vllm", start_engine_probe("vllm"))
    assert found.level == "fail"
    assert "no_such_library" in found.detail
    assert "setup-vllm" in found.remedy


@pytest.mark.processes
def test_an_emulated_engine_needs_nothing() -> None:
    assert [each.level for each in check_engine("emulated", start_engine_probe("emulated"))] == ["ok"]


@pytest.mark.processes
def test_a_broker_that_does_not_answer_fails_and_the_rest_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("streamrl.inspection.diagnostics.checks.ENGINE_LIBRARIES", {})
    assert run_doctor(None, f"127.0.0.1:{free_ports(1)[0]}", as_json=True) == 2
    rows = json.loads(capsys.readouterr().out)
    levels = {row["check"]: row["level"] for row in rows}
    assert levels["broker"] == "fail"
    assert levels["codecs"] == "ok"
    assert all(row["remedy"] for row in rows if row["level"] != "ok")


def by_check(findings: list[Finding], check: str) -> list[Finding]:
    return [each for each in findings if each.check == check]


async def test_a_run_s_topics_are_held_against_the_catalogue(bootstrap_servers: str) -> None:
    connection = RunConnection(KafkaSettings(bootstrap_servers=bootstrap_servers), "checked")
    assert by_check(await check_cluster(connection), "topics")[0].level == "ok"  # none yet
    await apply_topics(bootstrap_servers, "checked", 4)
    findings = await check_cluster(connection)
    assert {each.level for each in findings} == {"ok"}
    assert "release" in by_check(findings, "broker")[0].detail
    await set_configs(bootstrap_servers, "checked.heartbeats", {"retention.ms": "1", "max.message.bytes": "1000"})
    findings = await check_cluster(connection)
    async with patience(20):  # a busy broker knows a while later what the controller has taken
        while by_check(findings, "topics")[0].level == "ok":
            await asyncio.sleep(0.1)
            findings = await check_cluster(connection)
    topics = {each.detail.split(": ")[2]: each.level for each in by_check(findings, "topics")}
    assert topics["max.message.bytes"] == "fail"
    assert topics["retention.ms"] == "warn"
    sizes = by_check(findings, "sizes")
    assert [each.level for each in sizes] == [
        "fail",
        "fail",
    ]  # a message, and a batch, may be larger than the topic takes
    assert "topics apply --run checked" in by_check(findings, "topics")[0].remedy


async def test_clocks_are_compared_with_heartbeats_that_come(bootstrap_servers: str) -> None:
    connection = RunConnection(KafkaSettings(bootstrap_servers=bootstrap_servers), "clocked")
    await apply_topics(bootstrap_servers, "clocked", 1)
    assert "not measured" in (await check_clocks(connection)).detail
    publisher = await KafkaBus(connection.kafka).publisher("w")

    slow_by_s = 0.0

    async def beat() -> None:
        while True:
            message = examples()["heartbeat"].replace(sent_at=time.time() - slow_by_s)
            await publisher.publish(Outgoing.of(HEARTBEATS.full_name("clocked"), message, key="w"))
            await asyncio.sleep(0.2)

    beating = asyncio.create_task(beat())
    try:
        right = await check_clocks(connection)
        slow_by_s = 600.0
        wrong = await check_clocks(connection)
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await publisher.close()
    assert right.level == "ok"
    assert "the broker stamps records" in right.detail
    assert wrong.level == "warn"
    assert re.search(r"worker-1 writes (599|600|601)\.\d s behind", wrong.detail)
