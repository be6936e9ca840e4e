"""What an engine must know of a model before it runs it: vocabulary, context, end tokens, tensors. Loads no weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from schemas.errors import ModelError

UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """Shape of a tensor, whether it holds floating point numbers, and the first of its tied names."""

    shape: tuple[int, ...]
    floating: bool
    owner: str


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """``max_length`` counts tokens of prompt and completion; ``eos_token_ids`` may be empty."""

    vocab_size: int
    max_length: int
    eos_token_ids: frozenset[int]
    tensors: Mapping[str, TensorFacts] = field(repr=False)
    config: Any = field(repr=False)


def one_line(error: BaseException) -> str:
    """The first line of what a library has to say."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def read_facts(model_path: str, max_model_len: int | None) -> ModelFacts:
    """Read a model's configuration and the names and shapes of its tensors.

    Raises:
        ModelError: there is no such model, or it is not a causal language model.
    """
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config = AutoConfig.from_pretrained(model_path)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise ModelError(
            f"expected a causal language model at {model_path}, got: {one_line(error)}; "
            f"set the model to a directory that from_pretrained can load"
        ) from error
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or UNLIMITED
    return ModelFacts(
        vocab_size=text.vocab_size,
        max_length=min(longest, max_model_len or longest),
        eos_token_ids=_eos_token_ids(model_path, config),
        tensors=describe_tensors(skeleton),
        config=config,
    )


def describe_tensors(model: torch.nn.Module) -> dict[str, TensorFacts]:
    """Every tensor of the state dict by name; tied ones share their owner."""
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), name)
    owner_of = {name: owners[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
    return {
        name: TensorFacts(tuple(tensor.shape), tensor.is_floating_point(), owner_of.get(name, name))
        for name, tensor in model.state_dict().items()
    }


def _eos_token_ids(model_path: str, config: Any) -> frozenset[int]:
    try:
        found = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:
        found = None
    if found is None:
        found = getattr(config.get_text_config(), "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)
