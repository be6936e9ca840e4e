"""What control says of one policy, and how its trainer stands to the stream by that."""

from typing import Any

from streamrl.consumers.training.ports import OwnStream
from streamrl.policies.attachment import ANY_STEP, Attachment, Promoted, SharedStream
from streamrl.schemas.control import InstanceState, Promotion, RunFinished, RunIdentity, Served, WeightsReady
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.messages import Message

IDENTITY = RunIdentity(run_id="u", holder="h", wire=1, since=0.0, orphans_through=3)
SINCE = PolicyVersion(4, 9)


def ready(lineage: int, number: int, promotion: Promotion | None = None) -> Message:
    version = PolicyVersion(lineage, number)
    about: dict[str, Any] = {"step": number, "manifest_sha256": "0" * 64, "relays": ("http://r",)}
    return WeightsReady(version=version, promotion=promotion, sequence=0, sent_at=0.0, **about)


def served(policy: str, since: PolicyVersion = SINCE) -> Message:
    return Served(policy=policy, since=since, sequence=0, sent_at=0.0)


def heard(policy: str, *messages: Message) -> Attachment:
    found = Attachment(policy)
    for message in (IDENTITY, *messages):
        found.hear(message)
    return found


def own() -> PolicyVersion:
    return PolicyVersion(5, 10)


def test_the_run_s_own_policy_has_the_stream_to_itself_until_another_one_is_served() -> None:
    assert heard("policy", ready(1, 7)).standing(None) == OwnStream()
    beside = heard("policy", ready(1, 7), served("rloo")).standing(None)
    assert isinstance(beside, SharedStream)
    assert (beside.run_id, beside.above_lineage, beside.shift_at(6)) == ("", 0, None)
    assert (beside.orphans_through(IDENTITY), OwnStream().orphans_through(IDENTITY)) == (3, 3)


def test_an_instance_joins_the_run_and_counts_in_served_versions() -> None:
    attachment = heard("rloo", ready(1, 7))
    standing = attachment.standing(None)
    assert (standing.run_id, standing.above_lineage, standing.orphans_through(IDENTITY)) == ("u", 0, 0)
    versions = standing.versions(own, 4)
    assert (versions.current, versions.max_age, versions.moves_alone) == ((1, 7), ANY_STEP, True)
    assert attachment.standing(2).versions(own, 4).max_age == 2
    attachment.hear(ready(1, 8))
    attachment.hear(InstanceState(policy="rloo", algorithm="rloo", mode="pause", sequence=0, sent_at=0.0))
    assert (versions.current, versions.is_paused) == ((1, 8), True)


def test_a_promoted_policy_goes_on_in_the_numbers_that_were_served_also_after_a_restart() -> None:
    standing = heard("rloo", ready(4, 9), served("rloo")).standing(None)
    assert isinstance(standing, SharedStream)
    assert (standing.promoted, standing.above_lineage, standing.shift_at(6)) == (Promoted(SINCE), 4, 4)
    versions = standing.versions(own, 4)
    assert (versions.current, versions.max_age, versions.next_step, versions.moves_alone) == ((5, 10), 4, 11, False)
    announced = ready(5, 11, Promotion(policy="rloo", since=SINCE, lineage=5, shift=4))
    assert heard("rloo", served("rloo"), announced).standing(None).shift_at(8) == 4


def test_a_standing_does_not_change_with_later_control_messages() -> None:
    attachment = heard("rloo", ready(4, 9), served("rloo"))
    standing, place = attachment.standing(None), attachment.place
    attachment.hear(served("policy", PolicyVersion(5, 12)))
    assert (place, attachment.place) == ((True, SINCE), (False, None))
    assert (standing.shift_at(6), standing.versions(own, 4).current) == (4, (5, 10))
    assert attachment.standing(None).shift_at(6) is None


def test_newer_weights_after_the_end_of_a_run_say_that_it_goes_on() -> None:
    attachment = heard("rloo", ready(1, 7), RunFinished(step=7, sequence=0, sent_at=0.0))
    assert attachment.run_is_over
    attachment.hear(ready(1, 7))
    assert attachment.run_is_over
    attachment.hear(ready(2, 7))
    assert not attachment.run_is_over
