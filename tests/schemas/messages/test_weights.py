import pytest
from pydantic import ValidationError

from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.weights import WeightFile, WeightManifest
from tests.schemas.examples import SHA256


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "chat_template.jinja", "merges.txt", "a-b_c.json"]
)
def test_plain_names_of_weight_files_are_taken(name: str) -> None:
    assert WeightFile(name=name, size=1, sha256=SHA256).name == name


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "a/b.json", ".hidden.json", "model.bin", "model.pt", "x.json\n", "", "a" * 200 + ".json"],
)
def test_paths_and_other_kinds_of_files_are_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        WeightFile(name=name, size=1, sha256=SHA256)


@pytest.mark.parametrize("sha256", ["", "0" * 63, "G" * 64, "A" * 64, "0" * 64 + "\n"])
def test_only_a_sha256_in_small_hex_is_a_checksum(sha256: str) -> None:
    with pytest.raises(ValidationError):
        WeightFile(name="config.json", size=1, sha256=sha256)


def test_a_manifest_survives_json() -> None:
    file = WeightFile(name="model.safetensors", size=3, sha256=SHA256)
    manifest = WeightManifest(version=PolicyVersion(1, 2), step=2, files=(file,), created_at=1.5)
    assert WeightManifest.model_validate_json(manifest.model_dump_json()) == manifest
