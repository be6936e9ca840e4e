from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from streamrl.consumers.training.model import (
    copy_tokenizer,
    load_model,
    load_reference,
    named_tensors,
    require_weights,
    resolve_device,
    with_floats_as,
)
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.schemas.errors import ModelError
from tests.consumers.training.factories import save_tiny_model

CPU = torch.device("cpu")


def test_a_path_without_a_model_gives_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="expected a causal language model") as caught:
        load_model(tmp_path, CPU)
    assert "\n" not in str(caught.value)


def cut(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:-1])


def with_another_name(weights: Path) -> None:
    save_file({name.replace("down_proj", "other"): tensor for name, tensor in load_file(weights).items()}, weights)


def with_another_shape(weights: Path) -> None:
    save_file({name: tensor[:1].clone() for name, tensor in load_file(weights).items()}, weights)


def as_shards_without_one(weights: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(weights.parent)
    weights.unlink()
    model.save_pretrained(weights.parent, max_shard_size="5KB")
    next(weights.parent.glob("model-00002-of-*")).unlink()


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (Path.unlink, r"got OSError: Error no file named model\.safetensors"),
        (cut, r"got SafetensorError: .*, in model\.safetensors of [\d,]+ bytes: truncated"),
        (
            with_another_name,
            r"all tensors of the model at .*, found none named 'model\.layers\.0\.mlp\.down_proj.* missing",
        ),
        (with_another_shape, r"of shape \(\d+.*, as config\.json at .* has it, got \(1"),
        (as_shards_without_one, r"got FileNotFoundError: .*model-00002-of"),
    ],
)
def test_incomplete_weights_give_one_line_without_reading_them(
    harm: Callable[[Path], None], says: str, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path)
    require_weights(tmp_path)
    harm(tmp_path / "model.safetensors")
    for look in (require_weights, lambda path: load_model(path, CPU)):
        with pytest.raises(ModelError, match=says) as caught:
            look(tmp_path)
        assert "\n" not in str(caught.value)


def test_a_model_of_a_hub_is_not_downloaded_for_a_look() -> None:
    require_weights("nobody/no-model")


def test_the_reference_is_frozen(model_path: Path) -> None:
    assert not any(parameter.requires_grad for parameter in load_reference(model_path, CPU).parameters())


def test_dropout_is_off(tmp_path: Path) -> None:
    model = load_model(save_tiny_model(tmp_path, attention_dropout=0.5), CPU)
    ids = torch.arange(6).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_named_tensors_load_as_a_model_with_tied_weights_named_once(tmp_path: Path, tied: bool) -> None:
    model = load_model(save_tiny_model(tmp_path, tie_word_embeddings=tied), CPU)
    tensors = named_tensors(model)
    assert ("lm_head.weight" in tensors) is not tied
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    again = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(again[name], tensor + 1)


def test_tensors_are_exported_in_the_asked_type(model_path: Path) -> None:
    tensors = with_floats_as(torch.bfloat16, named_tensors(load_model(model_path, CPU)))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_the_tokenizer_files_that_exist_are_copied(model_path: Path, tmp_path: Path) -> None:
    copy_tokenizer(model_path, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer_config.json"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused() -> None:
    with pytest.raises(ModelError, match="CUDA"):
        resolve_device(TrainingSettings(device="cuda"))
