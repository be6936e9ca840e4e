"""What is known of a model before it runs."""

import gc
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from streamrl.producers.generation.engines.model_files import (
    ModelFacts,
    check_weights,
    read_facts,
    read_weights,
)
from streamrl.schemas.errors import ModelError, WeightsError
from streamrl.weights.tensors import map_tensors
from tests.producers.generation.engines.conftest import EOS, VOCAB, build_model


def test_facts_come_from_the_directory(model_dir: Path, no_eos_dir: Path) -> None:
    facts = read_facts(str(model_dir), None)
    assert (facts.vocab_size, facts.max_length, facts.ends.ids) == (VOCAB, 1024, frozenset({EOS}))
    assert facts.tensors["lm_head.weight"].shape == (VOCAB, 64)
    assert read_facts(str(no_eos_dir), None).ends.ids == frozenset()


def test_the_length_can_be_lowered_but_not_raised(model_dir: Path) -> None:
    assert read_facts(str(model_dir), 100).max_length == 100
    assert read_facts(str(model_dir), 5000).max_length == 1024


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="expected a causal language model at") as caught:
        read_facts(str(tmp_path / "nowhere"), None)
    assert "\n" not in str(caught.value)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ModelError, match="expected a causal language model"):
        read_facts(str(tmp_path), None)


@pytest.fixture(scope="module")
def facts(model_dir: Path) -> ModelFacts:
    return read_facts(str(model_dir), None)


@pytest.fixture
def tensors(model_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(model_dir / "model.safetensors")


def test_a_saved_model_fits_itself(model_dir: Path, facts: ModelFacts, tensors: dict[str, torch.Tensor]) -> None:
    read = read_weights(model_dir, facts.tensors)
    assert set(read) == set(tensors) == set(facts.tensors)
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_shards_make_one_model(facts: ModelFacts, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:5]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({name: tensors[name] for name in names[5:]}, tmp_path / "model-00002-of-00002.safetensors")
    assert set(read_weights(tmp_path, facts.tensors)) == set(names)


def test_one_of_two_tied_tensors_is_enough(tmp_path: Path) -> None:
    tied = build_model(tmp_path, EOS, tied=True)
    facts = read_facts(str(tied), None)
    found = check_weights(tied, facts.tensors)
    assert set(facts.tensors) - set(found) == {"lm_head.weight"}


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape", "kind", "twice", "truncated", "none", "pickle"])
def test_weights_that_do_not_fit_are_refused_whole(
    facts: ModelFacts, tensors: dict[str, torch.Tensor], tmp_path: Path, damage: str
) -> None:
    file = tmp_path / "model.safetensors"
    name = "model.norm.weight"
    match damage:
        case "missing":
            del tensors[name]
        case "unknown":
            tensors["model.extra"] = torch.zeros(1)
        case "shape":
            tensors[name] = torch.zeros(3)
        case "kind":
            tensors[name] = tensors[name].long()
        case "twice":
            save_file({name: tensors[name]}, tmp_path / "other.safetensors")
    if damage != "none":
        save_file(tensors, file)
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    if damage == "pickle":
        file.write_bytes(b"\x80\x04\x95\x0a\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01a\x94K\x01s.")
    with pytest.raises(WeightsError, match=r"expected .* got "):
        check_weights(tmp_path, facts.tensors)


def test_half_precision_fits_a_float_model(facts: ModelFacts, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    assert len(read_weights(tmp_path, facts.tensors)) == len(facts.tensors)


def test_reading_weights_leaves_no_memory_behind(model_dir: Path, facts: ModelFacts) -> None:
    def blocks_after(reads: int) -> int:
        for _ in range(reads):
            read_weights(model_dir, facts.tensors)
        gc.collect()
        return sys.getallocatedblocks()

    before = blocks_after(20)
    assert blocks_after(40) - before < 40


def test_tensors_are_read_wherever_they_stand_in_their_file(tmp_path: Path) -> None:
    numbers, flags = torch.tensor([1.5, -2.0]), torch.tensor([True, False, True])
    header = {
        "__metadata__": {"format": "pt"},
        "flags": {"dtype": "BOOL", "shape": [3], "data_offsets": [0, 3]},
        "numbers": {"dtype": "F32", "shape": [2, 1], "data_offsets": [3, 11]},
        "one": {"dtype": "I8", "shape": [], "data_offsets": [11, 12]},
        "none": {"dtype": "F32", "shape": [0, 4], "data_offsets": [12, 12]},
    }
    text = json.dumps(header).encode()
    content = flags.numpy().tobytes() + numbers.numpy().tobytes() + b"\x07"
    (tmp_path / "odd.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content)
    found = map_tensors(tmp_path / "odd.safetensors")
    assert torch.equal(found["flags"], flags)
    assert torch.equal(found["numbers"], numbers[:, None])
    assert found["one"].item() == 7
    assert found["none"].shape == (0, 4)
    found["flags"][0] = False
    assert torch.equal(map_tensors(tmp_path / "odd.safetensors")["flags"], flags)
