import hashlib
import json

import pytest
from pydantic import ValidationError

from streamrl.consumers.training.checkpoints.manifest import CheckpointFile, decode_manifest, encode_manifest
from streamrl.schemas.errors import CheckpointError
from streamrl.schemas.identifiers import PolicyVersion
from tests.consumers.training.checkpoints.damaged_storage import manifest_of

FILE = CheckpointFile(path="trainer_state/rng.safetensors", size=3, sha256="0" * 64)


def sealed(content: str) -> bytes:
    head = content.encode().rstrip()[:-1].rstrip() + b',\n "sha256": "'
    return head + hashlib.sha256(head).hexdigest().encode() + b'"\n}'


def test_a_manifest_is_read_back_as_written() -> None:
    manifest = manifest_of(3, 7, PolicyVersion(1, 4), files=(FILE,))
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_no_bit_of_a_manifest_can_change_unnoticed() -> None:
    data = encode_manifest(manifest_of(3, 7, PolicyVersion(1, 4), files=(FILE,)))
    for index in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[index] ^= 1 << bit
            with pytest.raises(CheckpointError, match="seal does not match"):
                decode_manifest(bytes(changed))


def test_a_manifest_cut_short_at_any_byte_or_made_longer_is_refused() -> None:
    data = encode_manifest(manifest_of(3, 7))
    for damaged in (*(data[:length] for length in range(len(data))), data + b"\n", b" " + data, data + data):
        with pytest.raises(CheckpointError):
            decode_manifest(damaged)


@pytest.mark.parametrize("content", ['{"format": 1}', "{}", '{"a": []}', '{"format": 2, "run": 7}'])
def test_garbage_under_a_sound_seal_is_refused_with_the_field_named(content: str) -> None:
    with pytest.raises(CheckpointError, match="expected a manifest of format 2"):
        decode_manifest(sealed(content))


def test_a_version_that_would_not_find_the_ended_groups_refuses_today_s_checkpoints_and_its_own_are_read() -> None:
    data = encode_manifest(manifest_of(1, 1))
    assert json.loads(data)["format"] == 3  # those versions take 2 alone
    older = data[: data.index(b',\n "sha256": "', -90)].decode().replace('"format": 3', '"format": 2') + "\n}"
    assert decode_manifest(sealed(older)) == manifest_of(1, 1).model_copy(update={"format": 2})


def test_another_format_is_refused() -> None:
    data = encode_manifest(manifest_of(1, 1)).replace(b'"format": 3', b'"format": 1')
    with pytest.raises(CheckpointError, match="'format' is wrong"):
        decode_manifest(sealed(data[: data.index(b',\n "sha256": "', -90)].decode() + "\n}"))


@pytest.mark.parametrize(
    "path",
    ["../x", "/etc/passwd", "a/../../x", "", ".", "a//b", "a/./b", "..\\x", "a\0b", "trainer_state/", "x" * 2000],
)
def test_a_file_name_that_leaves_the_checkpoint_is_refused(path: str) -> None:
    with pytest.raises(ValidationError):
        CheckpointFile(path=path, size=0, sha256="0" * 64)
