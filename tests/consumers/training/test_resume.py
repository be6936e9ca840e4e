import json
from collections import Counter

import pytest

from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.ingest.frontier import Frontier
from streamrl.consumers.ingest.ledger import FinishedGroups, KnownRecord
from streamrl.consumers.ingest.reader import ReaderSnapshot
from streamrl.consumers.ingest.rejections import SkipTally
from streamrl.consumers.training.checkpoints.manifest import CheckpointManifest, decode_manifest, encode_manifest
from streamrl.consumers.training.resume import (
    changed_sections,
    check_continues,
    config_marks,
    reader_document,
    reader_snapshot,
    stream_fields,
)
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.schemas.errors import CheckpointError
from streamrl.schemas.identifiers import PolicyVersion

FINISHED = FinishedGroups()
FINISHED.finish("p/0/0", [0, 1], 2)
FINISHED.finish("p/3/0", [1], 2)
SNAPSHOT = ReaderSnapshot(
    frontier=Frontier.from_json({"0": {"low": 4, "done": [7]}, "1": {"low": 0, "done": [], "passed": [[3, 9]]}}),
    finished_groups=FINISHED,
    known_records={0: KnownRecord(offset=7, trajectory_id="p/0/0/1")},
    tally=SkipTally(2, 5, "ab", Counter(stale=7)),
    prompt_cursor=12,
)


def manifest(snapshot: ReaderSnapshot = SNAPSHOT) -> CheckpointManifest:
    return CheckpointManifest(
        run="r",
        algorithm="grpo",
        lineage=2,
        step=3,
        policy_version=PolicyVersion(2, 3),
        config_hash="",
        created_at=0.0,
        **stream_fields(snapshot),
    )


def test_a_reader_goes_on_where_the_checkpoint_was_taken_with_rows_of_its_own() -> None:
    kept = decode_manifest(encode_manifest(manifest()))
    found = reader_snapshot(kept, json.loads(json.dumps(reader_document(SNAPSHOT))), lineage=3)
    assert found.frontier.to_json() == SNAPSHOT.frontier.to_json()
    assert (found.finished_groups, found.known_records, found.prompt_cursor) == (
        SNAPSHOT.finished_groups,
        SNAPSHOT.known_records,
        12,
    )
    assert found.tally == SkipTally(3, 0, "ab", Counter(stale=7))


def test_without_a_checkpoint_a_reader_begins_at_the_beginning() -> None:
    assert reader_snapshot(None, {}, lineage=1) == ReaderSnapshot(tally=SkipTally(1))


def test_the_config_marks_change_with_the_settings() -> None:
    assert config_marks({"algorithm": AlgorithmSettings()}) == config_marks({"algorithm": AlgorithmSettings()})
    assert config_marks({"algorithm": AlgorithmSettings()}) != config_marks({"algorithm": AlgorithmSettings(beta=0.1)})


def test_changed_settings_are_named_by_their_section() -> None:
    before = config_marks({"algorithm": AlgorithmSettings(), "training": TrainingSettings()})
    after = config_marks({"algorithm": AlgorithmSettings(), "training": TrainingSettings(max_steps=7)})
    assert changed_sections(before, after) == ["training"]
    assert changed_sections(before, before) == []
    assert changed_sections("0123", after) == ["algorithm", "training"]


@pytest.mark.parametrize(("run", "algorithm"), [("other", "grpo"), ("r", "rloo")])
def test_a_checkpoint_of_another_run_or_algorithm_is_refused(run: str, algorithm: str) -> None:
    check_continues(manifest(), "r", "grpo", "changed")
    with pytest.raises(CheckpointError, match="another run directory"):
        check_continues(manifest(), run, algorithm, "")
