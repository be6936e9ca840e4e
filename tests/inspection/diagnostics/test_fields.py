import pytest

from streamrl.bus.port import Record
from streamrl.consumers.ingest.filters import weighted_reward
from streamrl.inspection.diagnostics.fields import check_fields, known_fields, line_of, shown_record
from streamrl.inspection.diagnostics.filters import ABSENT
from streamrl.observability.run_state.trajectory_summary import summary_of
from streamrl.schemas.codec import encode, headers_of
from streamrl.schemas.errors import UserError
from streamrl.schemas.messages import Message
from streamrl.schemas.topics import CATALOGUE, CONTROL, DEAD_LETTERS, STEPS, TRAJECTORIES, Topic
from tests.schemas.examples import examples, trajectory


def record(message: Message, topic: str = "run.t") -> Record:
    return Record(topic, 3, 17, "key", encode(message), headers_of(message), 1000.5)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("worker_id", "worker-1"),
        ("length", 7),
        ("prompt_length", 3),
        ("reward", 1.0),
        ("rewards.accuracy", 1.0),
        ("rewards.format", None),
        ("rewards.none", ABSENT),
        ("seconds", 1.25),
        ("oldest_version.number", 20),
        ("version_spans.length", 2),
        ("version_spans.1.version", (1, 21)),
        ("version_spans.9.version", ABSENT),
        ("token_ids.2", 2000),
        ("partition", 3),
        ("offset", 17),
        ("headers.schema", "trajectory"),
        ("problem", None),
        ("worker_id.more", ABSENT),
        ("no_such", ABSENT),
    ],
)
def test_a_field_is_found_by_its_path(path: str, value: object) -> None:
    assert shown_record(record(trajectory(7)), TRAJECTORIES).field(path) == value


def test_a_reward_is_weighted_as_it_is_trained() -> None:
    rewards = {"correct": 1.0, "format": 1.0, "brief": None, "other": 0.25}
    message = trajectory(7, rewards=rewards, reward_errors={})
    weights = {"correct": 2.0, "format": 0.0, "brief": 1.0}
    assert shown_record(record(message), TRAJECTORIES, weights).field("reward") == 2.25
    assert summary_of(record(message), weights).reward == 2.25  # type: ignore[union-attr]
    assert "  reward 2.250  " in line_of(shown_record(record(message), TRAJECTORIES, weights))
    assert weighted_reward(message, weights) == (2.25, None)


def test_names_of_metrics_may_have_slashes_and_dots() -> None:
    report = examples()["step-report"].replace(metrics={"kafka/lag/bucket_0": 4.0, "a.b": 2.0, "reward": 0.5})
    found = shown_record(record(report), STEPS)
    assert found.field("metrics.kafka/lag/bucket_0") == 4.0
    assert found.field("metrics.a.b") == 2.0
    assert found.field("reward") == 0.5
    assert (found.field("trajectories"), found.field("groups")) == (2, 2)


def test_a_record_that_does_not_decode_has_a_problem_and_its_own_fields() -> None:
    broken = shown_record(Record("run.trajectories", 0, 1, None, b"\x01", (), 5.0), TRAJECTORIES)
    assert str(broken.field("problem")).startswith("UnknownSchema")
    assert broken.field("size") == 1
    assert broken.field("worker_id") is ABSENT


def test_a_dead_letter_names_its_source() -> None:
    headers = (("dlq-error-class", b"MalformedFrame"), ("dlq-topic", b"run.trajectories"), ("dlq-partition", b"0"))
    letter = shown_record(
        Record("run.dead-letters", 0, 1, None, b"\x01", (*headers, ("dlq-offset", b"9")), 5.0), DEAD_LETTERS
    )
    assert letter.field("origin_offset") == 9
    assert letter.field("origin_partition") == 0
    assert letter.field("error_class") == "MalformedFrame"


def test_a_mistyped_field_is_refused_with_the_nearest_right_one() -> None:
    with pytest.raises(UserError, match="did you mean length"):
        check_fields(["lenght"], TRAJECTORIES)
    check_fields(["length", "rewards.anything", "headers.x"], TRAJECTORIES)
    check_fields(["manifest_sha256", "mode", "incarnation"], CONTROL)
    check_fields(["anything"], None)


@pytest.mark.parametrize("topic", CATALOGUE, ids=lambda topic: topic.name)
def test_every_topic_has_known_fields(topic: Topic) -> None:
    assert (known_fields(topic) or set()) > {"partition", "offset", "problem"}
