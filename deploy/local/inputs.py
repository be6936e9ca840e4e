"""What a run depends on besides its settings: prompts, reward code and model, with fingerprints to notice changes.

``task_of`` combines them with the settings that say what a trajectory means. The start that takes a run over records it
with the run's identity. So it is decided there, once, whether trajectories of earlier starts belong to the same task.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from streamrl.consumers.algorithms.settings import is_import_path
from streamrl.consumers.ingest.settings import ORDERS
from streamrl.producers.prompts.fingerprints import filter_fingerprint, prompts_fingerprint
from streamrl.producers.rewards.builtin import BUILT_IN, DATASET
from streamrl.schemas.fingerprints import (
    code_fingerprint,
    files_fingerprint,
    hub_revision,
    package_version,
    text_fingerprint,
)
from streamrl.schemas.starts import RunInput
from streamrl.settings.features import features
from streamrl.settings.tree import Settings

MODEL_FILES = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".py")
"""Endings of files that a model and its tokenizer are read from; a README is none of them."""
LIBRARIES = {DATASET: "reasoning-gym", "math_verify": "math-verify"}
"""Packages besides our own that compute built-in rewards."""
REWARD_SETTINGS = (
    *("functions", "format_pattern", "answer_pattern", "judge_base_url", "judge_model", "judge_prompt"),
    "code_timeout_s",
)
"""Settings of ``[rewards]`` that decide what a completion earns. Weights are not among them: trajectories carry each
function's reward, and the trainer weights them."""
SETTINGS = "settings"
"""Name of the settings' part of a task."""
LONGEST_NAME = 256
"""Most characters of a name in the run's identity."""


def inputs_of(settings: Settings) -> list[RunInput]:
    """The run's inputs. Code is read and not imported; only a hub repository needs the network."""
    return [*_own_inputs(settings), *(each for feature in features() for each in feature.start.inputs(settings))]


def task_of(settings: Settings, inputs: Sequence[RunInput]) -> dict[str, str]:
    """The fingerprints of everything that says what a trajectory means, by name.

    If one differs, a trajectory's prompt or reward would be another one now.
    """
    # Without defaults, so that a release with more settings does not change the tasks of runs.
    data = settings.data.model_dump(mode="json", exclude={"path", "seed"}, exclude_defaults=True)
    if settings.data.path is None:  # generated prompts depend on the seed; stored ones only change their order
        data["seed"] = settings.run.seed if settings.data.seed is None else settings.data.seed
    rewards = settings.rewards.model_dump(mode="json", include=set(REWARD_SETTINGS), exclude_defaults=True)
    sampling = settings.loop.sampling_params().model_dump(mode="json", exclude_defaults=True)
    task = {SETTINGS: text_fingerprint(json.dumps([data, rewards, sampling], sort_keys=True))}
    return task | {
        each.name[:LONGEST_NAME]: each.fingerprint
        for each in inputs
        if each.shapes_trajectories and each.fingerprint is not None
    }


def _own_inputs(settings: Settings) -> Iterator[RunInput]:
    data, order, algorithm = settings.data, settings.ingest.sampling, settings.algorithm
    if not data.requests_only:
        yield RunInput("prompts", prompts_fingerprint(data))
    if data.filter is not None:
        yield RunInput(f"prompt filter {data.filter}", filter_fingerprint(data))
    if settings.generation.engine != "emulated":  # which has neither a model nor real rewards
        yield from (RunInput(f"reward {name}", _reward_fingerprint(name)) for name in settings.rewards.functions)
        yield RunInput("model", _model_fingerprint(settings.model.path))
    if algorithm.teacher.path:
        yield RunInput("teacher", _model_fingerprint(algorithm.teacher.path), shapes_trajectories=False)
    code = [algorithm.name] * is_import_path(algorithm.name) + [order] * (order not in ORDERS)
    yield from (RunInput(f"code of {name}", code_fingerprint(name), shapes_trajectories=False) for name in code)


def _reward_fingerprint(function: str) -> str | None:
    """A built-in reward's packages with their versions; of any other function the source."""
    if function not in (DATASET, *BUILT_IN):
        return code_fingerprint(function)
    packages = ("streamrl", *([LIBRARIES[function]] if function in LIBRARIES else []))
    return ", ".join(version for package in packages if (version := package_version(package)) is not None)


def _model_fingerprint(path: str) -> str | None:
    place = Path(path)
    if not place.is_dir():
        return hub_revision(path, "model")
    try:
        found = {each.name: each for each in place.iterdir() if each.suffix in MODEL_FILES and each.is_file()}
        return files_fingerprint(found)
    except OSError:
        return None
