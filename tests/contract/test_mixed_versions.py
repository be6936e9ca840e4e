"""While a run goes on, its processes are replaced one by one: what this version writes the last one reads, and back."""

from collections.abc import Iterator
from enum import Enum
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from streamrl.schemas import control
from streamrl.schemas.codec import MESSAGES, decode, encode, headers_of
from streamrl.schemas.errors import WireVersionError
from streamrl.schemas.messages import WIRE_VERSION, Message, check_wire_version, is_compatible_wire_version
from tests.contract.last_version import last_version
from tests.schemas.examples import examples

NEW_KINDS: set[str] = set()
"""Messages that the last version does not know: its readers pass over them, and do without what they say."""
NEW_WORDS: dict[str, set[str]] = {}
"""Values that it does not know, by class and field. Say here what its processes make of them, and which are replaced
first.
"""
NOT_UNDERSTOOD: tuple[str, ...] = ()
"""Examples of schemas that it knows, with a kind or word that it does not."""
OF_NEW_KINDS = [name for name, message in examples().items() if message.SCHEMA in NEW_KINDS]
KNOWN = [name for name in examples() if name not in OF_NEW_KINDS and name not in NOT_UNDERSTOOD]

last = last_version()


@pytest.mark.parametrize("name", KNOWN)
def test_the_last_version_reads_messages_of_this_one(name: str) -> None:
    message = examples()[name]
    reader = last.codec.decode(encode(message), headers_of(message))
    assert_agree(reader.model_dump(mode="json"), message.model_dump(mode="json"), name)


@pytest.mark.parametrize("name", KNOWN)
def test_messages_of_the_last_version_are_read(name: str) -> None:
    message = examples()[name]
    written = last.codec.decode(encode(message), headers_of(message))
    read = decode(last.codec.encode(written), last.codec.headers_of(written))
    assert_agree(written.model_dump(mode="json"), read.model_dump(mode="json"), name)
    # What it does not say has the value that stands for not having said it.
    for field in set(type(read).model_fields) - set(type(written).model_fields):
        assert getattr(read, field) == type(read).model_fields[field].get_default(call_default_factory=True), field


@pytest.mark.parametrize("name", OF_NEW_KINDS)
def test_a_new_kind_of_message_is_named_as_unknown_by_the_last_version(name: str) -> None:
    message = examples()[name]
    with pytest.raises(last.codec.UnknownSchema, match=message.SCHEMA):
        last.codec.decode(encode(message), headers_of(message))


@pytest.mark.parametrize("name", NOT_UNDERSTOOD)
def test_a_new_word_is_refused_by_the_last_version_as_malformed(name: str) -> None:
    message = examples()[name]
    with pytest.raises(last.codec.MalformedFrame):
        last.codec.decode(encode(message), headers_of(message))


def test_kinds_and_words_new_since_the_last_version_are_listed() -> None:
    """A kind or word beyond the lists is added there with a look at what readers of the last version make of it."""
    theirs = {**last.codec.MESSAGES, **_control_kinds(last.control)}
    ours = {**MESSAGES, **_control_kinds(control)}
    assert theirs.keys() <= ours.keys()
    assert ours.keys() - theirs.keys() == NEW_KINDS
    before = {field: words for kind in theirs.values() for field, words in _words(kind)}
    now = {field: words for kind in theirs for field, words in _words(ours[kind])}
    assert {field: now[field] - words for field, words in before.items() if now[field] != words} == NEW_WORDS
    # Readers know a schema's new version one release before anybody writes it.
    assert all(ours[kind].VERSION == theirs[kind].VERSION for kind in theirs)
    assert last.wire + bool(NEW_KINDS or NEW_WORDS) == WIRE_VERSION


def test_versions_that_differ_by_one_work_together_and_others_are_refused_in_one_line() -> None:
    near = [wire for wire in range(1, 9) if is_compatible_wire_version(wire)]
    assert near == [wire for wire in range(1, 9) if abs(wire - WIRE_VERSION) <= 1]
    check_wire_version("the trainer of run demo", last.wire)
    with pytest.raises(WireVersionError, match=r"update this process") as newer:
        check_wire_version("the trainer of run demo", WIRE_VERSION + 2)
    assert (newer.value.exit_code, "\n" in str(newer.value)) == (2, False)


def assert_agree(one: Any, other: Any, where: str) -> None:
    """Equal in all that both say."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() & other.keys():
            assert_agree(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list) and isinstance(other, list):
        assert len(one) == len(other), where
        for number, pair in enumerate(zip(one, other, strict=True)):
            assert_agree(*pair, f"{where}[{number}]")
    else:
        assert one == other, where


def _control_kinds(module: Any) -> dict[str, type[Message]]:
    union = get_args(get_args(module.ControlMessage)[0])
    return {kind.model_fields["kind"].default: kind for kind in union}


def _words(model: type[BaseModel]) -> Iterator[tuple[str, set[str]]]:
    """The fields that take words of a list, here and in the parts of the message, with those words."""
    for name, field in model.model_fields.items():
        found: set[str] = set()
        for part in _parts(field.annotation):
            if get_origin(part) is Literal:
                found |= set(get_args(part))
            elif isinstance(part, type) and issubclass(part, Enum):
                found |= {each.value for each in part}
            elif isinstance(part, type) and issubclass(part, BaseModel):
                yield from _words(part)
        if found:
            yield f"{model.__name__}.{name}", found


def _parts(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal or not get_args(annotation):
        yield annotation
    else:
        for argument in get_args(annotation):
            yield from _parts(argument)
