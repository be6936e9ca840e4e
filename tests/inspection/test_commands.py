"""The commands as a user types them, on a real broker."""

import asyncio
import json
import uuid
from pathlib import Path

import pytest

from streamrl.bus.history import BusHistory
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.kafka.topic_admin import apply_topics
from streamrl.bus.port import Outgoing, Record
from streamrl.consumers.training.checkpoints.manifest import MANIFEST, STATE, encode_manifest
from streamrl.inspection.audit.command import audit_run, export_run
from streamrl.inspection.dead_letters import list_dead_letters, retry_dead_letters, show_dead_letter
from streamrl.inspection.export import SegmentHistory
from streamrl.inspection.process import NICENESS
from streamrl.observability.record_index.entries import RETRY_OF
from streamrl.schemas.codec import encode, headers_of
from streamrl.schemas.errors import UserError
from streamrl.schemas.reports import SkipReason
from streamrl.schemas.topics import DEAD_LETTERS, TRAJECTORIES
from streamrl.settings.run_directory import RunDirectory
from tests.command import ended
from tests.consumers.factories import trajectory
from tests.inspection.audit import written_topics
from tests.inspection.audit.test_balance import busy_world

SERVERS = "STREAMRL_KAFKA__BOOTSTRAP_SERVERS"


@pytest.fixture
def past(
    bootstrap_servers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[RunDirectory, written_topics.WrittenTopics]:
    """A run that balances, with its checkpoint, and its topics on the broker."""
    run = f"audited-{uuid.uuid4().hex[:8]}"
    monkeypatch.setattr(written_topics, "RUN", run)
    monkeypatch.setenv(SERVERS, bootstrap_servers)
    world, directory = busy_world(3), RunDirectory(tmp_path / run)
    manifest = world.saved[-1].manifest
    state = directory.checkpoints / f"step_{manifest.step}" / STATE
    state.mkdir(parents=True)
    (state / MANIFEST).write_bytes(encode_manifest(manifest))
    directory.config.write_text(f'[run]\nname = "{run}"\n[model]\npath = "absent"\n[data]\npath = "absent"\n')
    asyncio.run(_publish(bootstrap_servers, run, [out for _, out in world.written], create=True))
    return directory, world


async def _publish(servers: str, run: str, records: list[Outgoing], *, create: bool = False) -> None:
    if create:
        await apply_topics(servers, run, 3)
    publisher = await KafkaBus(KafkaSettings(bootstrap_servers=servers)).publisher("test")
    for record in records:
        await publisher.submit(record)
    await publisher.close()


async def _read(servers: str, topic: str) -> list[Record]:
    history = BusHistory(KafkaBus(KafkaSettings(bootstrap_servers=servers)))
    return sorted([record async for record in history.records(topic)], key=lambda r: (r.partition, r.offset))


def test_a_balanced_run_ends_with_0_and_one_that_is_not_with_4_and_the_first_offender(
    past: tuple[RunDirectory, written_topics.WrittenTopics], capsys: pytest.CaptureFixture[str], bootstrap_servers: str
) -> None:
    directory, world = past
    assert audit_run(directory.path, None, as_json=False) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"balanced: run {directory.path.name}")
    assert "+ pending" in shown
    victim = min(world.current.trained)
    world.written.clear()
    world.skip(victim, SkipReason.FILTERED)
    asyncio.run(_publish(bootstrap_servers, directory.path.name, [out for _, out in world.written]))
    done = ended("audit", "--run", str(directory.path))
    assert (done.returncode, done.niceness) == (4, NICENESS), done.stderr
    first = done.stdout.splitlines()[0]
    assert first.startswith("NOT BALANCED: two_fates")
    assert str(world.log[victim[0]][victim[1]]) in first
    assert audit_run(directory.path, None, as_json=True) == 4
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["balanced"] is False
    assert verdict["violations"][0]["kind"] == "two_fates"
    assert verdict["algorithms"]["grpo"]["produced"] == verdict["produced"]


def test_an_export_is_audited_without_a_broker(
    past: tuple[RunDirectory, written_topics.WrittenTopics],
    capsys: pytest.CaptureFixture[str],
    bootstrap_servers: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    directory, _ = past
    assert export_run(directory.path, tmp_path / "out", "parquet", []) == 0
    assert f"{directory.path.name}.steps" in capsys.readouterr().out
    topic = TRAJECTORIES.full_name(directory.path.name)
    on_the_broker = asyncio.run(_read(bootstrap_servers, topic))

    async def exported() -> list[Record]:
        return [record async for record in SegmentHistory(tmp_path / "out").records(topic)]

    assert sorted(asyncio.run(exported()), key=lambda r: (r.partition, r.offset)) == on_the_broker
    monkeypatch.setenv(SERVERS, "127.0.0.1:1")
    assert audit_run(None, tmp_path / "out", as_json=False) == 0
    with pytest.raises(UserError, match="--out"):
        export_run(directory.path, tmp_path / "out", "parquet", [])
    with pytest.raises(UserError, match="'nonsense'"):
        export_run(directory.path, tmp_path / "else", "jsonl", ["nonsense"])


def test_dead_letters_are_listed_shown_and_retried_once(
    past: tuple[RunDirectory, written_topics.WrittenTopics], capsys: pytest.CaptureFixture[str], bootstrap_servers: str
) -> None:
    run, good = past[0].path.name, trajectory()
    topic = TRAJECTORIES.full_name(run)

    def letter(value: bytes, offset: int, error: str) -> Outgoing:
        where = (("dlq-topic", topic.encode()), ("dlq-partition", b"1"), ("dlq-offset", str(offset).encode()))
        why = (("dlq-error-class", error.encode()), ("dlq-error", b"expected better"))
        return Outgoing(DEAD_LETTERS.full_name(run), value, "k", 0, (*headers_of(good), *where, *why))

    letters = [letter(encode(good), 5, "UnknownSchema"), letter(b"junk", 6, "MalformedFrame")]
    asyncio.run(_publish(bootstrap_servers, run, letters))
    before = len(asyncio.run(_read(bootstrap_servers, topic)))

    assert list_dead_letters(past[0].path, None, None, "1h", json_lines=False) == 0
    shown = capsys.readouterr().out
    assert "MalformedFrame" in shown
    assert "2 dead letters" in shown
    assert list_dead_letters(past[0].path, None, "UnknownSchema", None, json_lines=True) == 0
    assert [json.loads(line)["origin_offset"] for line in capsys.readouterr().out.splitlines()] == [5]
    assert show_dead_letter(past[0].path, None, 0) == 0
    assert "decoding it today: a trajectory" in capsys.readouterr().out
    with pytest.raises(UserError, match="offset 9"):
        show_dead_letter(past[0].path, None, 9)

    def retry(*offsets: int, everything: bool = False, dry_run: bool = False) -> tuple[int, str]:
        code = retry_dead_letters(past[0].path, offsets, everything=everything, dry_run=dry_run, force=False)
        return code, capsys.readouterr().out

    code, shown = retry(everything=True, dry_run=True)
    assert (code, "would send" in shown, "refused" in shown) == (1, True, True)
    assert len(asyncio.run(_read(bootstrap_servers, topic))) == before
    assert retry(0)[0] == 0
    code, shown = retry(everything=True)
    assert (code, "already retried" in shown) == (1, True)
    after = asyncio.run(_read(bootstrap_servers, topic))
    assert len(after) == before + 1
    (sent,) = [record for record in after if any(name == RETRY_OF for name, _ in record.headers)]
    assert (sent.partition, sent.value, sent.key) == (1, encode(good), "k")
    with pytest.raises(UserError, match="--all"):
        retry()
    with pytest.raises(UserError, match="17"):
        retry(17)


def test_mistakes_of_the_user_end_with_2_and_one_line(tmp_path: Path) -> None:
    done = ended("audit", "--run", str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    done = ended("audit")
    assert done.returncode == 2
    assert "--export DIR" in done.stderr
