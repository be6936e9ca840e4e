"""Whether a run's task can be trained at all: a look at prompts, tokenizer, rewards, engine and disk before it starts.

It is carried out in a process of its own, which ends before the run begins: a tokenizer brings along libraries of half
a gigabyte, which the supervisor would keep for the whole run. ``streamrl run --dry-run`` looks at more, and refuses by
what stands here: what it calls a failure no run begins with.

Invariant a_pointless_run_is_refused: with prompts of which (nearly) none can be sampled, a model without tokenizer or
whole weights, a reward that scores too little, an engine that is not there or a disk that is too small, no broker is
started and nothing is written.
"""

import asyncio
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from streamrl.bus.embedded.process import die_with_parent
from streamrl.consumers.algorithms.shelf import algorithm_of
from streamrl.consumers.ingest.sampling import open_window
from streamrl.producers.generation.prompt_survey import PromptSurvey, survey
from streamrl.producers.prompts.sources import open_source
from streamrl.producers.rewards.trial import RewardTrial, try_rewards
from streamrl.schemas.errors import ModelError, RewardLoadError, StreamRLError, UserError
from streamrl.schemas.import_path import load_function, own_command
from streamrl.schemas.trajectories import Prompt
from streamrl.settings.features import features
from streamrl.settings.run_directory import RunDirectory, bytes_on_disk
from streamrl.settings.tree import Settings

if TYPE_CHECKING:
    from streamrl.producers.generation.engines.model_files import ModelFacts

log = structlog.get_logger()

MOST_PROMPTS = 256
PROMPTS_PATIENCE_S = 3.0
"""A sample: the dry run looks at more prompts."""
REWARD_ROWS = 48
REWARDS_PATIENCE_S = 10.0
"""Rows that rewards are tried on, or what can be done in that time; a fault of one row in twenty shows nine times of
ten."""
FLOOR_BYTES = 1 << 30
"""Disk for logs, Kafka's data and whatever else, beside weights and checkpoints."""
_BYTES_PER_PARAMETER = 4
"""float32, in which the trainer keeps weights and optimizer state."""
_CHECKPOINT_COPIES = 3
"""Weights and the two moments of AdamW."""
CHECK_TIMEOUT_S = 180.0
"""For a hub or a disk that does not answer: the run, which waits for the same, shows better what is going on."""


def require_readable(place: Path, setting: str) -> None:
    """Make sure that a file, or all of a directory, may be read; what is no path here is left to others.

    Libraries say of a file that they may not read that it is not there, or that the model is of no known kind.

    Raises:
        UserError: it may not.
    """
    for path in (place, *sorted(place.rglob("*"))) if place.exists() else ():
        if not os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK):
            found = path.stat()
            raise UserError(
                f"expected files at {setting} that this process may read (uid {os.getuid()}), got {path} with mode "
                f"{stat.S_IMODE(found.st_mode):04o} of uid {found.st_uid}; chmod -R a+rX {place}"
            )


@dataclass(frozen=True)
class DiskRoom:
    """Bytes that a run will yet write to the disk of its directory, and bytes that are free there."""

    needed: int
    free: int
    place: Path

    @property
    def is_enough(self) -> bool:
        """Whether the run fits."""
        return self.free >= self.needed

    def __str__(self) -> str:
        needed, free = self.needed / 1e9, self.free / 1e9
        said = f"about {needed:.1f} GB for weights, checkpoints and logs, {free:.1f} GB free at {self.place}"
        return said if self.is_enough else f"{said}; make room, keep fewer checkpoints, or set run.directory"


def disk_room(settings: Settings, parameters: int) -> DiskRoom:
    """What a run needs and has; ``parameters`` of its model, 0 where none is trained.

    Raises:
        UserError: its directory cannot be written.
    """
    place, training = must_be_writable(settings.run.path), settings.training
    # One more of each than is kept, since a new one is complete before an old one is deleted, and no more than there
    # will be; and each worker caches one version of the weights.
    # needed = floor + P * 4 bytes * (3 * checkpoints + weight versions) - what is there of both
    kept = min(training.keep_checkpoints, training.max_steps // training.checkpoint_every + 1)
    checkpoints = 0 if training.checkpoint_location else _CHECKPOINT_COPIES * (kept + 1)
    weights = min(training.keep_weight_versions, training.max_steps) + 1 + settings.run.workers
    to_come = parameters * _BYTES_PER_PARAMETER * (checkpoints + weights)
    there = sum(map(bytes_on_disk, (RunDirectory(settings.run.path).checkpoints, settings.run.path / "weights")))
    return DiskRoom(FLOOR_BYTES + max(0, to_come - there), shutil.disk_usage(place).free, place)


def require_room(settings: Settings, parameters: int) -> None:
    """Make sure that a run fits on its disk; see ``disk_room``.

    Raises:
        UserError: it does not, or its directory cannot be written.
    """
    if not (room := disk_room(settings, parameters)).is_enough:
        raise UserError(f"expected room on the disk, got too little: {room}")


def must_be_writable(path: Path) -> Path:
    """The nearest directory that exists, after a file was written there and removed.

    Raises:
        UserError: none can be.
    """
    parent = path.absolute()
    while not parent.exists():
        parent = parent.parent
    # Tried rather than asked for permissions, which say nothing of a file system that is mounted read-only.
    try:
        with tempfile.TemporaryFile(dir=parent):
            return parent
    except OSError as error:
        raise UserError(f"expected to write into {parent} for {path}, got: {error.strerror}") from error


def parameters_of(facts: "ModelFacts") -> int:
    """Numbers in the weights, tied ones once."""
    return sum(prod(tensor.shape) for name, tensor in facts.tensors.items() if tensor.owner == name)


def require_engine(settings: Settings, facts: "ModelFacts | None") -> None:
    """Make sure that what this machine shall compute with is there, and takes the model.

    Raises:
        ModelError: the engine's library is not installed, a device that was asked for is not there, or the engine does
            not take the model.
    """
    from streamrl.consumers.training.model import resolve_device
    from streamrl.producers.generation.engines.factory import build_engine
    from streamrl.producers.generation.engines.slots import check_reach

    # Workers and a trainer that join from elsewhere have libraries and devices of their own.
    if settings.run.trainer:
        resolve_device(settings.training)
    if (settings.run.workers or settings.run.max_workers) and settings.generation.engine != "emulated":
        # Built, not started: that loads no weights yet.
        build_engine(settings.generation, settings.model.path, settings.loop.sampling_params())
        resolve_device(settings.training.model_copy(update={"device": settings.generation.device}))
    if facts is not None and settings.generation.engine == "transformers":
        check_reach(settings.model.path, facts)


def fails_too_often(trial: RewardTrial, settings: Settings) -> bool:
    """Whether a reward fails on so many rows, whatever the completion, that a run would end because of it."""
    return trial.lost_share > settings.ingest.max_unrewarded_share


class SampledPrompts:
    """The first prompts of a run, which are a random sample of its data; ``total``: how many a pass over it has."""

    def __init__(self, settings: Settings) -> None:
        """Open the data.

        Raises:
            UserError: there is none to be had.
        """
        self._source = open_source(settings.data, run_seed=settings.run.seed)
        self.total = len(self._source) if isinstance(self._source, Sized) else settings.data.size

    def first(self, most: int, patience_s: float, monotonic: Callable[[], float] = time.monotonic) -> Iterator[Prompt]:
        """At most so many, and fewer where making or using them takes long."""
        began = monotonic()
        for position in range(min(most, self.total)):
            if position and monotonic() - began > patience_s:
                return
            yield self._source.prompt_at(position)[0]


def is_pointless(found: PromptSurvey, max_refused_share: float) -> bool:
    """Whether so many prompts are refused that a run would end because of it."""
    return found.refused_count == found.checked or found.refused_count > max_refused_share * found.checked


def check_task(settings: Settings, *, resumed: bool = False) -> list[str]:
    """What is worth a warning before this run.

    A ``resumed`` one has trained on this task, and workers refuse what has become of it meanwhile: only engine, model
    and disk are looked at.

    Raises:
        UserError: the run would be pointless, and why.
    """
    command = own_command("streamrl.deploy.local.task_check", *(["resumed"] if resumed else []))
    # Without the broker's section: its secrets are no business of this process.
    given = settings.model_dump_json(exclude={"kafka"})
    try:
        done = subprocess.run(
            command,
            input=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=CHECK_TIMEOUT_S,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            preexec_fn=die_with_parent,
        )
        answer = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        log.warning("the task was not checked before its start", error=str(error)[:300])
        return []
    if (refusal := answer["refusal"]) is not None:
        raise UserError(refusal)
    warnings: list[str] = answer["warnings"]
    return warnings


def checked(settings: Settings, *, resumed: bool = False) -> list[str]:
    """The check itself; see ``check_task``."""
    from streamrl.consumers.training.model import require_weights
    from streamrl.producers.generation.engines.model_files import read_facts
    from streamrl.producers.generation.tokenizer import ModelTokenizer

    facts = read_facts(settings.model.path, settings.generation.max_model_len)
    require_weights(settings.model.path)
    require_engine(settings, facts)
    require_room(settings, parameters_of(facts))
    if resumed:
        return []
    if function := settings.evaluation.function:
        load_function(function)
    algorithm_of(settings.algorithm)  # one of the user's own may not be there, or not take its options
    open_window(settings.loop, settings.ingest, lambda: 0)  # nor may a priority
    asyncio.run(_try_features(settings))
    tokenizer = ModelTokenizer(settings.model.path, settings.data.chat_template_kwargs)
    if settings.data.requests_only:
        return []
    prompts = SampledPrompts(settings)
    sample = [*prompts.first(MOST_PROMPTS, PROMPTS_PATIENCE_S)]
    found = survey(tokenizer, sample, min(settings.loop.max_prompt_length, facts.max_length - 1))
    said = f"{found.refused_count:,} of {found.checked:,} prompts"
    if found.checked < prompts.total:
        said += f" (a sample of {prompts.total:,})"
    if is_pointless(found, settings.ingest.max_refused_share):
        raise ModelError(
            f"expected prompts that can be sampled, got {said} that would be refused: {found.causes()}; "
            "streamrl run --dry-run tells more"
        )
    asyncio.run(_check_rewards(settings, sample[:REWARD_ROWS]))
    return [f"{said} will be refused and skipped: {found.causes()}"] if found.refused else []


async def _try_features(settings: Settings) -> None:
    for feature in features():
        await feature.start.try_out(settings)


async def _check_rewards(settings: Settings, prompts: list[Prompt]) -> None:
    for trial in await try_rewards(settings.rewards, prompts, REWARDS_PATIENCE_S):
        if fails_too_often(trial, settings):
            raise RewardLoadError(
                f"expected reward {trial.name} to score completions, got errors on {len(trial.lost)} of {trial.rows} "
                f"rows, the first: {trial.first_error}; mend the function, or raise ingest.max_unrewarded_share"
            )


def main() -> None:
    """Settings as JSON from standard input; the answer as JSON on standard output."""
    # Whatever a library or a user's module prints must not get into the answer.
    answer_to, sys.stdout = sys.stdout, sys.stderr
    settings = Settings.model_validate_json(sys.stdin.read())
    answer: dict[str, object] = {"refusal": None, "warnings": []}
    try:
        answer["warnings"] = checked(settings, resumed="resumed" in sys.argv)
    except UserError as error:
        answer["refusal"] = str(error)
    except StreamRLError as error:
        answer["warnings"] = [f"not all of the task could be checked: {error}"]
    json.dump(answer, answer_to)


if __name__ == "__main__":
    main()
