"""The keys of the settings tree: which there are, which were renamed, and which one a wrong key was meant to be."""

import difflib
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel

from schemas.secrets import is_secret
from settings.tree import Settings

Key = tuple[str, ...]
"""``loop.mode`` as ``("loop", "mode")``."""

RENAMED = {
    "intake": "ingest",
    "batching.launch_share": "batching.fixed_cost_fraction",
    "batching.quadratic_share": "batching.attention_cost_fraction",
    "coordinator.finish_patience_s": "coordinator.finish_timeout_s",
    "dispatch.adoption_patience_s": "dispatch.weight_sync_timeout_s",
    "generation.standstill_s": "generation.fencing_timeout_s",
    "generation.stream_tokens": 'generation.partial_trajectories = "stream"',
    "kafka.stall_rebuilds": "kafka.max_client_restarts",
    "lengths.learn_after": "lengths.min_samples",
    "lengths.memory": "lengths.reservoir_size",
    "training.grad_norm_spike": "training.max_grad_norm_ratio",
    "training.max_refused_steps": "training.max_skipped_steps",
}
"""Keys and sections under their old names: loading refuses those and names the new ones."""

REMOVED = {
    "ingest.group_timeout_s": "a group is closed when its last sample is there, or the dispatcher has given it up",
}
"""Keys that mean nothing any more, and what holds instead."""

_IN_OTHER_LIBRARIES = {
    "batch_size": "loop.groups_per_step",
    "rollout_batch_size": "loop.groups_per_step",
    "train_batch_size": "loop.groups_per_step",
    "n": "loop.num_generations",
    "n_samples_per_prompt": "loop.num_generations",
    "group_size": "loop.num_generations",
    "max_response_length": "loop.max_completion_length",
    "max_new_tokens": "loop.max_completion_length",
    "max_off_policy_steps": "loop.max_staleness",
    "lr": "training.learning_rate",
    "kl_coef": "algorithm.beta",
    "clip_ratio": "algorithm.epsilon",
    "model_name_or_path": "model.path",
    "reward_funcs": "rewards.functions",
    "reward_weights": "rewards.weights",
    "train_files": "data.path",
    "input_key": "data.prompt_column",
    "label_key": "data.answer_column",
}
"""What TRL, verl, OpenRLHF and others call it."""


def known_keys(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[str]:
    """Every setting with its sections, such as ``loop.mode``; open tables such as ``data.options`` as one."""
    for name, field in model.model_fields.items():
        if section := _section(field.annotation):
            yield from known_keys(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


@cache
def secret_keys() -> frozenset[Key]:
    """The settings whose values nobody may see."""
    return frozenset(_secret_keys(Settings, ()))


def _secret_keys(model: type[BaseModel], section: Key) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        if inner := _section(field.annotation):
            yield from _secret_keys(inner, (*section, name))
        elif is_secret(field.annotation):
            yield (*section, name)


def keys_in(section: Key) -> list[str]:
    """The names that stand in a section; none if it is none."""
    model: type[BaseModel] | None = Settings
    for part in section:
        field = model.model_fields.get(part) if model else None
        model = _section(field.annotation) if field else None
    return sorted(model.model_fields) if model else []


def suggestion(location: Key) -> str:
    """The right name for a wrong one: the same name in another section, a similar one beside it, or all beside it."""
    *parents, wrong = location
    beside = keys_in(tuple(parents))
    by_leaf = {key.rpartition(".")[2]: key for key in known_keys()} | _IN_OTHER_LIBRARIES
    prefix = "".join(f"{part}." for part in parents)
    # Cutoffs of difflib's ratio: in its own section half of the letters are enough; elsewhere only what is nearly the
    # same, since there are some 240 names to be near to.
    close = difflib.get_close_matches(wrong, beside, n=1, cutoff=0.5)
    if wrong in by_leaf:
        right: str | None = by_leaf[wrong]
    elif close:
        right = prefix + close[0]
    else:
        elsewhere = difflib.get_close_matches(wrong, by_leaf, n=1, cutoff=0.75)
        right = by_leaf[elsewhere[0]] if elsewhere else None
    return f"; did you mean {right}?" if right else f"; there are {', '.join(beside)}"


def _section(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
