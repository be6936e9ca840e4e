"""Low-rank adapters in the policy: adds them, names them as peft does on disk, switches them off, merges them.

A linear layer W [out, in] computes with W + (alpha / r) B A. Only A [r, in] and B [out, r] are trained (Hu et al.,
LoRA, 2021, arXiv:2106.09685). B starts at 0, so the policy starts as its base. There is no dropout: the ratio of two
policies must not contain noise. With the adapters off, the model is the reference of the KL term.

Invariant an_adapter_belongs_to_its_base: loading an adapter compares the sha256 of the base's weights.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils.hub import cached_file

from streamrl.consumers.training.settings import LoraSettings
from streamrl.schemas.errors import CheckpointError, ModelError
from streamrl.schemas.extras import how_to_install
from streamrl.schemas.weights import ADAPTER, merged_weight, weights_sha256

ADAPTER_CONFIG = "adapter_config.json"
BASE = "base_model.json"
"""File in a checkpoint with an adapter: the base's path and the sha256 of its weights."""
_ON_DISK = "base_model.model."
_PARTS = (".lora_A.default.weight", ".lora_B.default.weight")


def model_directory(path: str | Path) -> Path:
    """The directory of a model's files on this machine: ``path`` itself, or the cache's for a name on the hub."""
    found = cached_file(str(path), "config.json")
    assert found is not None, "a loaded model has a configuration"
    return Path(found).parent


def add_adapters(model: Any, lora: LoraSettings) -> None:
    """Add adapters, drawn from torch's generator, to the model's linear layers, and freeze all other weights.

    Raises:
        ModelError: peft is not installed, or the model lacks the named layers.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ModelError(
            f"expected the package peft for training.lora.rank = {lora.rank}, got: {error}; "
            f"{how_to_install('lora')}, or set the rank to 0"
        ) from error
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.scaled_alpha,
        target_modules=[*lora.target_modules] or "all-linear",
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    wanted = ", ".join(lora.target_modules) or "any linear layer"
    try:
        # "all-linear" leaves out the model's output layer.
        inject_adapter_in_model(config, model)
    except ValueError as error:
        message = str(error).splitlines()[0]
        raise ModelError(
            f"expected {wanted} in {type(model).__name__} for training.lora.target_modules, got: {message}; "
            "name linear layers of this model"
        ) from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(_PARTS))


def has_adapters(model: Any) -> bool:
    """Whether the model has adapters."""
    return any(name.endswith(_PARTS) for name, _ in model.named_parameters())


def adapter_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The adapters' tensors, not copied, by their names in peft's files."""
    for name, parameter in model.named_parameters():
        if name.endswith(_PARTS):
            yield f"{_ON_DISK}{name.replace('.default.', '.')}", parameter.detach()


def layers_of(model: Any) -> list[str]:
    """Names of the layers that have adapters."""
    return [name.removesuffix(_PARTS[0]) for name, _ in model.named_parameters() if name.endswith(_PARTS[0])]


@torch.no_grad()
def load_adapter(model: Any, directory: Path, base_sha256: str) -> None:
    """Load the adapters of a checkpoint into a model that already has adapters of the same shapes.

    Raises:
        CheckpointError: they belong to another base, or have other layers or ranks.
    """
    base = json.loads((directory / BASE).read_text())
    if base["sha256"] != base_sha256:
        raise CheckpointError(
            f"expected the base of the adapter in {directory} (sha256 {base['sha256'][:12]}, was {base['path']}) at "
            f"model.path, got weights with sha256 {base_sha256[:12]}; set model.path to the model it was trained on"
        )
    stored, own = load_file(directory / ADAPTER), dict(adapter_tensors(model))
    shapes = ({name: tuple(tensor.shape) for name, tensor in each.items()} for each in (stored, own))
    found, expected = shapes
    if found != expected:
        differs = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))[0]
        raise CheckpointError(
            f"expected {differs} of shape {expected.get(differs)} in {directory / ADAPTER}, got {found.get(differs)}; "
            "training.lora was changed: set it back, or start another run with another run.name"
        )
    for name, tensor in own.items():
        tensor.copy_(stored[name])


def adapter_config(lora: LoraSettings, base: str, layers: list[str]) -> str:
    """``adapter_config.json`` as peft and vLLM read it, with the layers listed by name."""
    # The last part of each name, as in training.lora.target_modules: layers of one kind share it.
    kinds = sorted({name.rpartition(".")[2] for name in layers})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(Path(base).absolute()) if Path(base).is_dir() else base,
        "r": lora.rank,
        "lora_alpha": lora.scaled_alpha,
        "target_modules": kinds,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    return json.dumps(config, indent=2) + "\n"


def base_text(base: str, base_sha256: str) -> str:
    """The content of ``base_model.json``."""
    return json.dumps({"path": base, "sha256": base_sha256}, indent=2) + "\n"


def base_sha256(base: str | Path) -> str:
    """The sha256 of a base model's weights, which identifies it; reads all of them.

    Raises:
        WeightsError: it has no weights that can be read.
    """
    return weights_sha256(model_directory(base))


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """During the block, the model computes as its base."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    try:
        for layer in layers:
            layer.enable_adapters(enabled=False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(enabled=True)  # also makes them trainable again


class BaseScorer:
    """Log-probabilities of the policy's base: the policy's own scorer, with the adapters off."""

    def __init__(self, scorer: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]], model: Any) -> None:
        self._scorer, self._model = scorer, model

    def __call__(self, input_ids: Tensor, mask: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        """See ``CompletionScorer``."""
        with without_adapters(self._model):
            return self._scorer(input_ids, mask, temperatures)


@torch.no_grad()
def write_merged(model: Any, adapter: Path, target: Path) -> None:
    """Merge a checkpoint's adapter into ``model``, its base without adapters, and write it for ``from_pretrained``.

    Raises:
        CheckpointError: the adapter does not fit the model.
    """
    config = json.loads((adapter / ADAPTER_CONFIG).read_text())
    stored, weights = load_file(adapter / ADAPTER), model.state_dict()
    for name, a in stored.items():
        if not name.endswith(".lora_A.weight"):
            continue
        layer = name.removeprefix(_ON_DISK).removesuffix(".lora_A.weight")
        if f"{layer}.weight" not in weights:
            raise CheckpointError(
                f"expected a layer {layer} in the base model, found none; give the adapter's own base"
            )
        b = stored[name.replace(".lora_A.", ".lora_B.")]
        scale = config["lora_alpha"] / config["r"]
        weights[f"{layer}.weight"].copy_(merged_weight(weights[f"{layer}.weight"], a, b, scale))
    model.save_pretrained(target)
