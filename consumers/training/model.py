"""Loads the policy and names its tensors as Hugging Face does on disk. Knows no optimizer and no bus."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from streamrl.consumers.algorithms.losses import CompletionScorer
from streamrl.consumers.training.adapters import (
    adapter_tensors,
    add_adapters,
    base_sha256,
    has_adapters,
    load_adapter,
)
from streamrl.consumers.training.attention import prepare, restore
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.schemas.errors import ModelError
from streamrl.schemas.weights import ADAPTER

CPU = torch.device("cpu")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


def resolve_device(settings: TrainingSettings) -> torch.device:
    """The device to train on.

    Raises:
        ModelError: the setting is ``cuda``, and there is no CUDA device.
    """
    available = torch.cuda.is_available()
    if settings.device == "cuda" and not available:
        raise ModelError('expected a CUDA device for training.device="cuda", found none; set "auto" or "cpu"')
    return torch.device("cuda" if available and settings.device != "cpu" else "cpu")


def load_model(path: str | Path, device: torch.device, *, gradient_checkpointing: bool = False) -> Any:
    """A causal language model in float32 on the device, ready to train.

    Dropout is off: the ratio of two policies must not contain noise.

    Raises:
        ModelError: the path holds no model that ``AutoModelForCausalLM`` can load.
    """
    model, _ = _loaded(path, dtype=torch.float32)
    model.to(device)
    model.train()  # gradient checkpointing needs this mode; it also switches on dropout
    _silence_dropout(model)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def require_weights(path: str | Path) -> list[str]:
    """The names of the tensors in a model's directory that the model has no place for; reads only the files' headers.

    Checks that ``load_model`` will find every tensor, and only one where the configuration ties two. A hub's name is
    not checked: that would download the model.

    Raises:
        ModelError: as ``load_model``.
    """
    if not Path(path).is_dir():
        return []
    # the same code as ``load_model``, on a device without memory
    model, unused = _loaded(path, device_map="meta")
    _refuse_two_values(Path(path), model.all_tied_weights_keys)
    return unused


def _refuse_two_values(directory: Path, tied: Mapping[str, str]) -> None:
    """Refuse files that give one tensor two values: under its name twice, or where the configuration ties two names.

    Libraries disagree on them: transformers keeps both, vLLM and older versions use one. The trainer would learn from
    samples of another model.
    """
    with ExitStack() as opened:
        files = [opened.enter_context(safe_open(file, framework="pt")) for file in directory.glob("*.safetensors")]
        slices: dict[str, Any] = {}
        for name, found in ((name, file.get_slice(name)) for file in files for name in file.keys()):  # noqa: SIM118
            if name in slices and not _are_equal(slices[name], found):
                raise ModelError(
                    f"expected one set of weights in {str(directory)!r}, got {name!r} in two safetensors files with "
                    "different values; remove the files of the set that is not meant"
                )
            slices[name] = found
        for name, source in tied.items():
            if name in slices and source in slices and not _are_equal(slices[name], slices[source]):
                raise ModelError(
                    f"expected {name!r} to equal {source!r} in {str(directory)!r}, because tie_word_embeddings in "
                    "config.json makes them one tensor, got two that differ; set it to false to train both, or remove "
                    f"{name!r} from the file"
                )


def _are_equal(one: Any, other: Any) -> bool:
    rows = one.get_shape()[0]
    # a block of rows at a time, since each may be gigabytes; most that differ do so in the first
    return one.get_shape() == other.get_shape() and all(
        torch.equal(one[start : start + COMPARED_ROWS].float(), other[start : start + COMPARED_ROWS].float())
        for start in range(0, rows, COMPARED_ROWS)
    )


COMPARED_ROWS = 4096
"""Rows of two matrices that are compared at a time: tens of megabytes."""
FIRST_ROWS = 16
"""Rows of a matrix that are looked at: one of them may be zero, as a padding token's embedding is."""


def weight_faults(path: str | Path) -> list[str]:
    """The faults in the values of a model's tensors, each with the name of a tensor that has it.

    Reads the first rows of each matrix in the directory's files: enough for a file that was never filled, or saved in
    another format. A hub's name is not looked at: that would download the model.
    """
    found: dict[str, list[str]] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                if fault := _fault_of(tensors.get_slice(name)):
                    found.setdefault(fault, []).append(name)
    return [f"{fault} ({len(names)} tensors, such as {names[0]})" for fault, names in found.items()]


def _fault_of(tensor: Any) -> str:
    if not tensor.get_shape():
        return ""
    rows, is_matrix = tensor[:FIRST_ROWS], len(tensor.get_shape()) > 1
    if not rows.is_floating_point():
        return "" if not is_matrix else "weights are whole numbers, as quantised ones are, which cannot be trained"
    if not bool(rows.float().isfinite().all()):
        return "weights are NaN or infinite"
    # norms and biases may be zero
    return "" if not is_matrix or bool(rows.any()) else "weights are zero"


def _loaded(path: str | Path, **options: Any) -> tuple[Any, list[str]]:
    """The model, and the names of the tensors in its files that it has no place for."""
    transformers_logging.disable_progress_bar()
    try:
        # We check the loading info ourselves, because transformers fills missing tensors with random values.
        model, found = AutoModelForCausalLM.from_pretrained(
            path, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        cause = (str(error).strip() or repr(error)).splitlines()[0].rstrip(".")
        raise ModelError(
            f"expected a causal language model at {str(path)!r}, got {type(error).__name__}: {cause}"
            f"{_broken_file(Path(path))}; give a Hugging Face model directory or name"
        ) from error
    if missing := sorted(found["missing_keys"]):
        raise ModelError(
            f"expected all tensors of the model at {str(path)!r}, found none named {missing[0]!r} "
            f"({len(missing)} missing); fetch or save the whole model again"
        )
    if wrong := sorted(found["mismatched_keys"]):
        name, shape, wanted = wrong[0]
        raise ModelError(
            f"expected {name!r} of shape {tuple(wanted)}, as config.json at {str(path)!r} has it, got {tuple(shape)} "
            f"({len(wrong)} differ); take configuration and weights of the same model"
        )
    return model, sorted(found["unexpected_keys"])


def _broken_file(directory: Path) -> str:
    """The first file that cannot be opened, for a message: safetensors' errors do not name it. Empty: all can."""
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError):
            return f", in {file.name} of {file.stat().st_size:,} bytes: truncated, or not downloaded"
    return ""


def open_policy(initial: str | Path, restored: Path | None, device: torch.device, training: TrainingSettings) -> Any:
    """The model to train: a checkpoint's if there is one, else the initial one.

    With adapters, it is always the initial model, plus the checkpoint's adapters if there is one.

    Raises:
        ModelError: see ``load_model``; or an adapter is there unexpectedly, or is missing.
        CheckpointError: the checkpoint's adapter has another base, or another shape.
    """
    lora, directory = training.lora, restored or initial
    if (found := (Path(directory) / ADAPTER).exists()) and not (lora.rank and restored):
        raise ModelError(
            f"expected a whole model at {directory}, got an adapter: set training.lora as before, or merge the adapter "
            "first (`streamrl checkpoints merge --run RUN --out DIR`)"
        )
    if lora.rank and restored and not found:
        raise ModelError(
            f"expected an adapter in {restored} for training.lora.rank = {lora.rank}, got a whole model: the run "
            "trained all weights before; set the rank to 0, or start another run with another run.name"
        )
    path = initial if lora.rank else directory
    model = load_model(path, device, gradient_checkpointing=training.gradient_checkpointing)
    if lora.rank:
        add_adapters(model, lora)
        if restored:
            load_adapter(model, restored, base_sha256(initial))
    return model


def load_reference(path: str | Path, device: torch.device) -> Any:
    """A frozen copy for the KL term.

    Raises:
        ModelError: as ``load_model``.
    """
    model = load_model(path, device)
    model.eval()
    model.requires_grad_(False)
    return model


def open_scorer(model: Any, training: TrainingSettings) -> CompletionScorer:
    """A scorer that computes log-probs as the settings say. It also sets the model's attention.

    Raises:
        ModelError: see ``CompletionScorer`` and ``prepare``.
    """
    restore(model)  # a what-if replay uses the same model with other settings
    scorer = CompletionScorer(model, float32_head=training.cast_lm_head_to_fp32, packing=training.packing)
    prepare(model, training)
    return scorer


def named_tensors(model: Any) -> dict[str, Tensor]:
    """The weights by the names of Hugging Face files, tied ones once, on the CPU, floats as float32."""
    moved = {name: tensor.to("cpu", _as_float32(tensor)).contiguous() for name, tensor in _unique_tensors(model)}
    return as_on_disk(model, moved)


def _unique_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors by name, not copied, tied ones once; only the adapters if it has any."""
    if has_adapters(model):  # all other weights are frozen
        yield from adapter_tensors(model)
        return
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in model.state_dict().items():
        # Tied weights share their memory, and safetensors refuses to save the same memory under two names.
        identity = (tensor.data_ptr(), tensor.shape)
        if identity not in seen:
            seen.add(identity)
            yield name, tensor.detach()


def as_on_disk(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in the layout and with the names of Hugging Face files, which some models change in memory."""
    if has_adapters(model):
        return tensors
    converted: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return converted


def _as_float32(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.is_floating_point() else tensor.dtype


class WeightCopy:
    """A copy of a model's weights on the CPU, in memory that is allocated once, and pinned for a CUDA device.

    Allocating fresh pages would cost about as much as the copy itself, and copies to memory that is not pinned are
    several times slower.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._memory: dict[str, Tensor] = {}

    def take(self, model: Any) -> dict[str, Tensor]:
        """Copy the weights, named as by ``named_tensors``, floats as ``dtype``; overwrites the last call's copy."""
        tensors = as_on_disk(model, dict(_unique_tensors(model)))
        for name, tensor in tensors.items():
            wanted = self.dtype if tensor.is_floating_point() else tensor.dtype
            if name not in self._memory:
                self._memory[name] = torch.empty(tensor.shape, dtype=wanted, pin_memory=tensor.is_cuda)
            # Rounded on the device, so that only the bytes that are kept are copied to the CPU.
            self._memory[name].copy_(tensor.to(wanted) if tensor.is_cuda else tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return self._memory


def with_floats_as(dtype: torch.dtype, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, the floating-point ones as ``dtype``."""
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def copy_tokenizer(path: str | Path, directory: Path) -> None:
    """Copy the tokenizer's files of a model (directory or hub name) that exist."""
    for name in TOKENIZER_FILES:
        found = cached_file(
            str(path),
            name,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if found is not None:
            shutil.copyfile(found, directory / name)


def _silence_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]
