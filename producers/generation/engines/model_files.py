"""A model on disk: the facts that an engine needs before it loads the model, and checks of new weights against it.

``read_facts`` loads no weights. Vocabulary and context come from the configuration, end tokens also from the tokenizer,
names and shapes of tensors from a skeleton on torch's meta device.

A published low-rank adapter is checked against the model that the worker has loaded; the base is loaded once.

Invariants:
- weights_that_do_not_fit_are_refused_whole: names, shapes and kinds of all tensors are compared before any is loaded;
- an_adapter_belongs_to_its_base: an adapter is only used if the worker's model has the sha256 that the adapter's
  manifest names.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from streamrl.producers.generation.vocabulary import EndTokens, end_tokens, load_tokenizer, tokenizer_size
from streamrl.schemas.errors import ModelError, WeightsError
from streamrl.schemas.weights import ADAPTER, manifest_in, merged_weight, weights_sha256
from streamrl.weights.tensors import KINDS, map_tensors

_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
UNLIMITED = 1 << 30
"""Tokens of context of a model that names no limit, such as one with relative positions."""


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """Facts of a tensor. ``floating``: whether it is floating-point; ``owner``: the first of its tied names."""

    shape: tuple[int, ...]
    floating: bool
    owner: str


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a model. ``max_length``: tokens of prompt and completion. ``tokenizer_size``: one more than the largest
    id of its tokenizer's ordinary tokens, 0 if it has none.
    """

    vocab_size: int
    max_length: int
    ends: EndTokens
    tokenizer_size: int
    tensors: Mapping[str, TensorFacts] = field(repr=False)
    config: Any = field(repr=False)


def one_line(error: BaseException) -> str:
    """The first non-empty line of an error's message, or the error's type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def read_facts(model_path: str, max_model_len: int | None) -> ModelFacts:
    """Read a model's configuration and the names and shapes of its tensors.

    Raises:
        ModelError: there is no model, it is not a causal language model, or its files name an end that is no token.
    """
    try:
        config = _quiet_config(model_path)
        with torch.device("meta"):  # shapes without memory, since a second copy of the model may not fit
            skeleton = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise ModelError(
            f"expected a causal language model at {model_path}, got: {one_line(error)}; "
            f"use a directory that from_pretrained can load"
        ) from error
    tokenizer = _tokenizer_of(model_path)
    return ModelFacts(
        vocab_size=config.get_text_config().vocab_size,
        max_length=_context(config, max_model_len),
        ends=end_tokens(model_path, tokenizer, config),
        tokenizer_size=0 if tokenizer is None else tokenizer_size(tokenizer),
        tensors=describe_tensors(skeleton),
        config=config,
    )


def _quiet_config(model_path: str) -> Any:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    return AutoConfig.from_pretrained(model_path)


def _tokenizer_of(model_path: str) -> Any:
    try:
        return load_tokenizer(model_path)
    except ModelError:  # an engine can sample without one; code that needs text reports the error
        return None


def _context(config: Any, max_model_len: int | None) -> int:
    longest: int = getattr(config.get_text_config(), "max_position_embeddings", None) or UNLIMITED
    return min(longest, max_model_len or longest)


def describe_tensors(model: torch.nn.Module) -> dict[str, TensorFacts]:
    """Facts of each tensor of the state dict, by name. Tied tensors have the same owner."""
    # A state dict repeats tied tensors under each of their names; only their parameters are the same object.
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), name)
    owner_of = {name: owners[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
    return {
        name: TensorFacts(tuple(tensor.shape), tensor.is_floating_point(), owner_of.get(name, name))
        for name, tensor in model.state_dict().items()
    }


def check_weights(directory: Path, tensors: Mapping[str, TensorFacts]) -> dict[str, Path]:
    """Compare the headers of all safetensors files of a directory with a model's tensors.

    Returns:
        The file of each tensor. One of several tied tensors suffices.

    Raises:
        WeightsError: a file is unreadable, or a tensor is missing, unknown, repeated, or has another shape or kind.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"expected safetensors files in {directory}, got none; publish the version again")
    found: dict[str, Path] = {}
    for file in files:
        for name, shape, kind in _read_header(file):
            _check_tensor(name, shape, kind, tensors.get(name), file, repeated=name in found)
            found[name] = file
    _check_complete(found, tensors, directory)
    return found


def check_sent(
    names: Sequence[str],
    dtype_names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    tensors: Mapping[str, TensorFacts],
    where: str,
) -> None:
    """Compare the tensors that a sender announces with a model's. ``dtype_names``: torch's; ``where``: for messages.

    Raises:
        WeightsError: see ``check_weights``.
    """
    kinds = {str(dtype).removeprefix("torch."): kind for kind, dtype in KINDS.items()}
    found: set[str] = set()
    for name, dtype, shape in zip(names, dtype_names, shapes, strict=True):
        _check_tensor(name, shape, kinds.get(dtype, dtype), tensors.get(name), where, repeated=name in found)
        found.add(name)
    _check_complete(found, tensors, where)


def _check_complete(found: Iterable[str], tensors: Mapping[str, TensorFacts], where: Path | str) -> None:
    # One of several tied tensors suffices: a publisher may write them once or under each name.
    owners = {tensors[name].owner for name in found}
    missing = [name for name, facts in tensors.items() if facts.owner not in owners]
    if missing:
        raise WeightsError(
            f"expected all {len(tensors)} tensors of the model in {where}, "
            f"got none named {missing[0]!r} ({len(missing)} missing); publish a complete state dict"
        )


def read_weights(directory: Path, tensors: Mapping[str, TensorFacts]) -> dict[str, torch.Tensor]:
    """Check a directory of weights, then read it into memory.

    Raises:
        WeightsError: see ``check_weights``.
    """
    files = check_weights(directory, tensors)
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(set(files.values())):
        try:
            weights.update(map_tensors(file))
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise WeightsError(f"expected a readable safetensors file, got {file}: {error}; fetch it again") from error
    return weights


def _read_header(file: Path) -> list[tuple[str, tuple[int, ...], str]]:
    try:
        with safe_open(file, framework="pt") as stored:
            # ``safe_open`` has ``keys``, but is not a mapping that can be iterated.
            slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
            return [(name, tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()]
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"expected a readable safetensors file, got {file}: {error}; fetch it again") from error


def _check_tensor(
    name: str, shape: tuple[int, ...], kind: str, expected: TensorFacts | None, where: Path | str, *, repeated: bool
) -> None:
    if repeated:
        raise WeightsError(f"expected each tensor once, got {name!r} again in {where}; publish the version again")
    if expected is None:
        raise WeightsError(f"expected tensors of the loaded model, got {name!r} in {where}; use the same model")
    if shape != expected.shape:
        raise WeightsError(
            f"expected {name!r} of shape {expected.shape}, got {shape} in {where}; use the same model everywhere"
        )
    # Precisions may differ, since copying converts them. Integers instead of weights are an error.
    is_floating = kind in KINDS and KINDS[kind].is_floating_point
    if is_floating != expected.floating:
        wanted = "floating-point" if expected.floating else "integer"
        raise WeightsError(f"expected {wanted} numbers in {name!r}, got {kind} in {where}; publish it in that type")


class LowRankPair(NamedTuple):
    """The adapter of a layer [out, in]: A [r, in] and B [out, r]."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True)
class PublishedAdapter:
    """A low-rank adapter. ``pairs``: by the name of the tensor to which ``scale`` times B A is added."""

    directory: Path
    rank: int
    scale: float
    pairs: Mapping[str, LowRankPair]

    @torch.no_grad()
    def merged(self, base: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The changed tensors: the base's with the adapter added."""
        return {name: merged_weight(base[name], a, b, self.scale) for name, (a, b) in self.pairs.items()}


@cache
def base_identity(model_path: str) -> str:
    """sha256 of the loaded model's weights, from its files, which are read once.

    Raises:
        WeightsError: the model has no files.
    """
    found = cached_file(model_path, "config.json")
    if found is None:
        raise WeightsError(f"expected a model's files at {model_path}, got none; use a model directory")
    return weights_sha256(Path(found).parent)


def read_adapter(directory: Path, tensors: Mapping[str, TensorFacts], model_path: str) -> PublishedAdapter | None:
    """The adapter in a version's directory; None if the directory has whole weights. ``model_path``: the loaded model.

    Raises:
        WeightsError: the adapter belongs to another base, or does not fit the model.
    """
    manifest = manifest_in(directory)
    if manifest is None or manifest.adapter is None:
        return None
    published = manifest.adapter
    if (found := base_identity(model_path)) != published.base_sha256:
        raise WeightsError(
            f"expected the base of the adapter (sha256 {published.base_sha256[:12]}) as this worker's model, got a "
            f"model of sha256 {found[:12]}; set model.path to the trainer's model, with the same files"
        )
    stored = map_tensors(directory / ADAPTER)
    pairs = {}
    for name, a in stored.items():
        if name.endswith(_A):
            weight = f"{name.removeprefix(_PREFIX).removesuffix(_A)}.weight"
            pairs[weight] = _pair(directory, weight, a, stored.get(name.replace(_A, _B)), tensors.get(weight))
    if 2 * len(pairs) != len(stored):
        raise WeightsError(f"expected pairs of adapters in {directory / ADAPTER}, got {len(stored)} tensors")
    return PublishedAdapter(directory, published.rank, published.scale, pairs)


def _pair(
    directory: Path, weight: str, a: torch.Tensor, b: torch.Tensor | None, facts: TensorFacts | None
) -> LowRankPair:
    if facts is None or b is None:
        missing = "a layer of that name in the model" if facts is None else "both of its tensors"
        raise WeightsError(f"expected {missing} for the adapter of {weight} in {directory}, got no match")
    if (b.shape[0], a.shape[1]) != facts.shape or b.shape[1] != a.shape[0]:
        raise WeightsError(
            f"expected an adapter of {weight} {facts.shape} in {directory}, got {tuple(b.shape)} × {tuple(a.shape)}"
        )
    return LowRankPair(a, b)
