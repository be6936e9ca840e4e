"""Bytes that an earlier version wrote can still be read. ``python -m tests.contract.test_golden_bytes`` adds files.

A file is written once, for a new kind or a new version of one, and never again: it stands for data that somebody has.
"""

from pathlib import Path

import pytest

from streamrl.schemas.codec import CONTROL_SCHEMA, MESSAGES, Headers, decode, encode
from streamrl.schemas.messages import Message
from tests.schemas.examples import examples

GOLDEN = Path(__file__).parent / "golden"


def headers_of(path: Path) -> Headers:
    """As the writer of that version sent them: spelled out here, because they are part of the contract."""
    name, version, _ = path.name.split(".")
    schema = examples()[name].SCHEMA.encode()
    return (
        ("schema", schema),
        ("schema-version", version.removeprefix("v").encode()),
        ("content-type", b"application/vnd.streamrl+msgpack"),
    )


@pytest.mark.parametrize("name", examples())
def test_bytes_written_by_earlier_versions_decode_to_the_same_values(name: str) -> None:
    files = sorted(GOLDEN.glob(f"{name}.v*.bin"))
    assert files, f"no golden bytes of {name}: run python -m tests.contract.test_golden_bytes"
    for path in files:
        assert decode(path.read_bytes(), headers_of(path)) == examples()[name]


def test_every_schema_and_its_newest_version_has_golden_bytes() -> None:
    newest = {schema: model.VERSION for schema, model in MESSAGES.items()}
    written = {dict(headers_of(path))["schema"].decode(): path for path in GOLDEN.glob("*.bin")}
    assert set(written) == {*newest, CONTROL_SCHEMA}
    for schema, version in newest.items():
        assert any(path.name.endswith(f".v{version}.bin") for path in GOLDEN.glob(f"{schema}*.bin"))


MODELS = sorted({type(each) for each in examples().values()}, key=lambda model: model.__name__)


@pytest.mark.parametrize("model", MODELS)
def test_every_field_is_set_in_some_golden_bytes(model: type[Message]) -> None:
    made = [message for message in examples().values() if type(message) is model]
    unset = [
        name
        for name, field in model.model_fields.items()
        if not field.is_required() and name != "kind" and all(_is_default(message, name) for message in made)
    ]
    assert unset == [], "add an example that sets it, and python -m tests.contract.test_golden_bytes"


def _is_default(message: Message, name: str) -> bool:
    default = type(message).model_fields[name].get_default(call_default_factory=True)
    return bool(getattr(message, name) == default)


def write_missing() -> None:
    for name, message in examples().items():
        path = GOLDEN / f"{name}.v{message.VERSION}.bin"
        if not path.exists():
            path.write_bytes(encode(message))


if __name__ == "__main__":
    write_missing()
