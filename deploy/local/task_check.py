"""Checks before a run starts whether its task can be trained: prompts, tokenizer, rewards, engine and disk.

The check runs in a separate process that ends before the run starts: neither the user's code nor libraries for models
belong into the supervisor. ``streamrl run --dry-run`` checks more, with the same criteria: a run does not start with
anything that the dry run reports as a failure.

Invariant a_pointless_run_is_refused: a run that cannot succeed leaves no broker and no file. These are its signs:
(nearly) no prompt can be sampled, the model has no tokenizer or incomplete weights, a reward fails too often, the
engine is missing, or the disk is too small.
"""

import asyncio
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from streamrl.consumers.algorithms.shelf import algorithm_of
from streamrl.consumers.ingest.limits import LIMITS
from streamrl.consumers.ingest.sampling import open_window
from streamrl.deploy.local.forking import ForkServer
from streamrl.deploy.local.long_steps import told_if_long
from streamrl.producers.generation.prompt_survey import PromptSurvey, survey
from streamrl.producers.prompts.settings import PLACEHOLDER
from streamrl.producers.prompts.sources import PASS_SIZE, PromptSource, StoredSource, open_source
from streamrl.producers.rewards.trial import Completion, RewardTrial, RewardTrials, Writer, try_rewards
from streamrl.schemas.errors import ModelError, RewardLoadError, StreamRLError, UserError
from streamrl.schemas.extras import require_extra
from streamrl.schemas.files import write_atomically
from streamrl.schemas.import_path import load_function, module_command
from streamrl.schemas.trajectories import FinishReason, Prompt
from streamrl.settings.features import features
from streamrl.settings.run_directory import RunDirectory, bytes_on_disk
from streamrl.settings.tree import Settings

if TYPE_CHECKING:
    from streamrl.producers.generation.engines.model_files import ModelFacts
    from streamrl.producers.generation.tokenizer import ModelTokenizer

log = structlog.get_logger()

MOST_PROMPTS = 256
PROMPTS_PATIENCE_S = 3.0
"""Limits on the sample of prompts (number and seconds); the dry run checks more prompts."""
REWARD_ROWS = 48
REWARDS_PATIENCE_S = 10.0
"""Limits on the rows that rewards are tried on (number and seconds). With 48 rows, a fault in one row of twenty is
found with a probability of 0.9."""
FLOOR_BYTES = 1 << 30
"""Disk space for logs, Kafka's data and other files, in addition to weights and checkpoints."""
_BYTES_PER_PARAMETER = 4
"""The trainer keeps weights and optimizer state in float32."""
_CHECKPOINT_COPIES = 3
"""Tensors per parameter in a checkpoint: the weight and AdamW's two moments."""
CHECK_TIMEOUT_S = 180.0
"""After this time the run starts without the check. A hub or disk that does not answer also blocks the run, and the
run reports it better."""


def require_readable(place: Path, setting: str) -> None:
    """Check that a file, or everything in a directory, is readable. A missing path is not checked.

    Libraries do not report this clearly: they call an unreadable file missing, or the model's type unknown.

    Raises:
        UserError: a file is not readable.
    """
    for path in (place, *sorted(place.rglob("*"))) if place.exists() else ():
        if not os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK):
            found = path.stat()
            raise UserError(
                f"expected files at {setting} that are readable for this process (uid {os.getuid()}), got {path} with "
                f"mode {stat.S_IMODE(found.st_mode):04o} of uid {found.st_uid}; run: chmod -R a+rX {place}"
            )


@dataclass(frozen=True)
class DiskRoom:
    """Disk space for a run. ``needed``: bytes that the run has yet to write. ``free``: bytes free at ``place``."""

    needed: int
    free: int
    place: Path

    @property
    def is_enough(self) -> bool:
        """Whether the run fits."""
        return self.free >= self.needed

    def __str__(self) -> str:
        needed, free = self.needed / 1e9, self.free / 1e9
        text = f"about {needed:.1f} GB for weights, checkpoints and logs, {free:.1f} GB free at {self.place}"
        return text if self.is_enough else f"{text}; free space, keep fewer checkpoints, or set run.directory"


def require_extras(settings: Settings) -> None:
    """Check that this machine has the packages that the settings need beyond the base installation.

    Raises:
        SettingsError: a package is missing; the message names the extra to install.
    """
    if settings.telemetry.traces != "off":
        require_extra("traces", f"telemetry.traces = {settings.telemetry.traces!r}")
    # A trainer and workers on other machines have their own packages.
    if settings.run.trainer and settings.training.lora.rank:
        require_extra("lora", f"training.lora.rank = {settings.training.lora.rank}")
    for feature in features():
        feature.start.packages(settings)


def disk_room(settings: Settings, parameters: int) -> DiskRoom:
    """The disk space that a run needs and has. ``parameters``: those of the trained model; 0: none is trained.

    Raises:
        UserError: the run's directory cannot be written.
    """
    place, training = require_writable(settings.run.path), settings.training
    # An old checkpoint or weight version is deleted only after a new one is complete. So the disk needs room for one
    # more than are kept. A run cannot keep more than it writes. Each worker also caches one weight version.
    # needed = floor + parameters * 4 bytes * (3 * checkpoints + weight versions) - bytes of both that exist already
    kept = min(training.keep_checkpoints, training.max_steps // training.checkpoint_every + 1)
    checkpoints = 0 if training.checkpoint_location else _CHECKPOINT_COPIES * (kept + 1)
    weights = min(training.keep_weight_versions, training.max_steps) + 1 + settings.run.workers
    to_come = parameters * _BYTES_PER_PARAMETER * (checkpoints + weights)
    existing = sum(map(bytes_on_disk, (RunDirectory(settings.run.path).checkpoints, settings.run.path / "weights")))
    return DiskRoom(FLOOR_BYTES + max(0, to_come - existing), shutil.disk_usage(place).free, place)


def require_room(settings: Settings, parameters: int) -> None:
    """Check that a run fits on its disk; see ``disk_room``.

    Raises:
        UserError: the run does not fit, or its directory cannot be written.
    """
    if not (room := disk_room(settings, parameters)).is_enough:
        raise UserError(f"expected enough disk space, got too little: {room}")


def require_writable(path: Path) -> Path:
    """The nearest existing directory of a path. A trial file is written there and removed.

    Raises:
        UserError: no file can be written there.
    """
    parent = path.absolute()
    while not parent.exists():
        parent = parent.parent
    # Permissions do not show that a file system is mounted read-only, so a file is written.
    try:
        with tempfile.TemporaryFile(dir=parent):
            return parent
    except OSError as error:
        raise UserError(f"expected to write into {parent} for {path}, got: {error.strerror}") from error


def parameters_of(facts: "ModelFacts") -> int:
    """The number of parameters; tied weights count once."""
    return sum(prod(tensor.shape) for name, tensor in facts.tensors.items() if tensor.owner == name)


def require_engine(settings: Settings, facts: "ModelFacts | None") -> None:
    """Check that this machine has the configured engine and devices, and that the engine supports the model.

    Raises:
        ModelError: the engine's library is not installed, a configured device does not exist, or the engine does not
            support the model.
    """
    from streamrl.consumers.training.model import resolve_device
    from streamrl.producers.generation.engines.factory import build_engine
    from streamrl.producers.generation.engines.slots import check_reach

    # Workers and a trainer on other machines have their own libraries and devices.
    if settings.run.trainer:
        resolve_device(settings.training)
    if (settings.run.workers or settings.run.max_workers) and settings.generation.engine != "emulated":
        # The engine is built but not started, so it loads no weights.
        build_engine(settings.generation, settings.model.path, settings.loop.sampling_params())
        resolve_device(settings.training.model_copy(update={"device": settings.generation.device}))
    if facts is not None and settings.generation.engine == "transformers":
        check_reach(settings.model.path, facts)


def fails_too_often(trial: RewardTrial, settings: Settings) -> bool:
    """Whether a run would stop because of this reward: it fails for every completion of too many rows."""
    return trial.lost_share > settings.ingest.max_unrewarded_share


def rewards_too_few(trials: RewardTrials, settings: Settings) -> bool:
    """Whether so many rows get no reward from any function that a run would stop because of it."""
    return len(trials.unrewarded) > settings.ingest.max_unrewarded_share * len(trials.rows)


def writer_of(settings: Settings, tokenizer: "ModelTokenizer") -> Writer:
    """Turns a text into the completion that rewards would see if the model wrote it: tokenised, and cut at a stop."""
    from streamrl.producers.generation.rollout import shown_text

    sampling = settings.loop.sampling_params()
    decode = tokenizer.decoder_for(sampling)

    def write(text: str) -> Completion:
        token_ids = tokenizer.encode_more(text)
        return shown_text(decode(token_ids), FinishReason.STOP, sampling), token_ids

    return write


def survey_of(
    settings: Settings, tokenizer: "ModelTokenizer", facts: "ModelFacts", prompts: Iterable[Prompt]
) -> PromptSurvey:
    """The prompts that can be sampled with this model, and those that cannot."""
    return survey(tokenizer, prompts, longest_prompt(settings, facts), facts.vocab_size)


def longest_prompt(settings: Settings, facts: "ModelFacts") -> int:
    """Most tokens of a prompt: a completion needs a position after it."""
    return min(settings.loop.max_prompt_length, facts.max_length - 1)


async def try_prompts(settings: Settings, name: str, prompts: Sequence[Prompt]) -> str:
    """A line on a set of prompts besides the run's own: their lengths, and their mean rewards.

    Raises:
        ModelError: (nearly) none can be sampled.
        RewardLoadError: a reward function fails too often.
    """
    from streamrl.producers.generation.engines.model_files import read_facts
    from streamrl.producers.generation.tokenizer import ModelTokenizer

    facts = read_facts(settings.model.path, settings.generation.max_model_len)
    tokenizer = ModelTokenizer(settings.model.path, settings.data.chat_template_kwargs)
    found = survey_of(settings, tokenizer, facts, prompts)
    if refuses_too_many(found):
        raise ModelError(_too_many_refused(found, f"{found.refused_count} of {found.checked} prompts of {name}"))
    trials = await _tried_rewards(settings, prompts[:REWARD_ROWS], writer_of(settings, tokenizer), f" in {name}")
    refused = f" ({found.refused_count} would be refused: {found.causes()})" if found.refused else ""
    paid = ", ".join(f"{trial.name} pays {trial.means()[0]:.3g} for own answers" for trial in trials if trial.rewards)
    return f"{name}: {found.checked} prompts{refused}, {paid}"


def _too_many_refused(found: PromptSurvey, refused: str) -> str:
    return (
        f"expected prompts that can be sampled, got {refused} that would be refused: {found.causes()}; "
        "for details: streamrl run --dry-run"
    )


class SampledPrompts:
    """The first prompts of a run, which are a random sample of its data.

    ``total``: prompts in one pass over the data. ``notes``: rows that are left out, and columns that rewards get in
    another form.
    """

    def __init__(self, settings: Settings) -> None:
        """Open the data.

        Raises:
            UserError: the data cannot be opened.
        """
        self._source = open_source(settings.data, run_seed=settings.run.seed, rewards=settings.rewards.functions)
        self.notes = _notes_on(self._source, settings.data.prompt_template)
        self.total = len(self._source) if isinstance(self._source, Sized) else PASS_SIZE

    def first(self, most: int, patience_s: float, monotonic: Callable[[], float] = time.monotonic) -> Iterator[Prompt]:
        """Yield at most ``most`` prompts, for ``patience_s`` seconds. The caller's time between prompts counts, too."""
        started_at = monotonic()
        for position in range(min(most, self.total)):
            if position and monotonic() - started_at > patience_s:
                return
            yield self._source.prompt_at(position)[0]


def _notes_on(source: PromptSource, template: str) -> list[str]:
    if not isinstance(source, StoredSource):
        return []
    binary = ", ".join(sorted(source.binary))
    # LaTeX has names in braces after a command, as in \boxed{answer}
    named = set(re.findall(r"(?<![A-Za-z])\{(\w+)\}", template))
    unfilled = ", ".join(f"{{{name}}}" for name in source.columns if name in named)
    # Other loops give these to the chat template, as this one gives it the column of tools.
    unseen = ", ".join(name for name in source.columns if name in ("functions", "documents"))
    return [
        *([source.left_out] if source.left_out else []),
        *([f"rewards get the bytes of column {binary} as base64 text"] if binary else []),
        *([f"data.prompt_template replaces {PLACEHOLDER} alone: {unfilled} stays as it is"] if unfilled else []),
        *([f"rewards get column {unseen}, the model does not see it; put it into the prompts"] if unseen else []),
    ]


def refuses_too_many(found: PromptSurvey) -> bool:
    """Whether a run would stop because too many prompts are refused."""
    return found.refused_count == found.checked or found.refused_count > LIMITS.max_refused_share * found.checked


def never_ends(settings: Settings) -> str:
    """A line for a model that names no token to end a completion with, in a run without stop strings."""
    return (
        f"expected a token that ends a completion at {settings.model.path}, got none in generation_config, config and "
        f"tokenizer: every completion will have loop.max_completion_length = {settings.loop.max_completion_length} "
        "tokens; set eos_token in tokenizer_config.json, or loop.stop"
    )


def check_task(settings: Settings, models: ForkServer, *, resumed: bool = False) -> list[str]:
    """Check the task in a process that ``models`` forks; returns warnings.

    A ``resumed`` run has already trained on this task, and workers refuse prompts that have changed since. So only
    engine, model and disk are checked.

    Raises:
        UserError: the run cannot succeed; the message says why.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streamrl-check-")))
            answered = stack.enter_context(tempfile.TemporaryFile("w+b"))
            stage, given = scratch / "stage", scratch / "settings"
            # The process gets no [kafka] section, because it does not need the secrets in it.
            given.write_text(settings.model_dump_json(exclude={"kafka"}))
            command = module_command("streamrl.deploy.local.task_check", str(stage), *(["resumed"] if resumed else []))
            with told_if_long("checking the task", lambda: _stage_in(stage)), given.open("rb") as asked:
                models.run(command, environment, (asked, answered, None), CHECK_TIMEOUT_S)
            answered.seek(0)
            answer = json.load(answered)
    except (OSError, ValueError) as error:
        log.warning("the task could not be checked before the start", error=str(error)[:300])
        return []
    if (refusal := answer["refusal"]) is not None:
        raise UserError(refusal)
    warnings: list[str] = answer["warnings"]
    return warnings


def _stage_in(path: Path) -> str:
    """What the process says that it does; it says nothing before its libraries are loaded."""
    try:
        return path.read_text()
    except OSError:
        return "loading libraries"


def checked(settings: Settings, *, resumed: bool = False, enter: Callable[[str], None] = lambda _: None) -> list[str]:
    """The check itself, in this process; see ``check_task``. ``enter`` is called at the start of each stage."""
    from streamrl.consumers.training.model import require_weights, weight_faults
    from streamrl.producers.generation.engines.model_files import read_facts
    from streamrl.producers.generation.tokenizer import ModelTokenizer

    enter("reading the model's files")
    facts = read_facts(settings.model.path, settings.generation.max_model_len)
    require_weights(settings.model.path)
    enter("looking for the engine and its devices")
    require_engine(settings, facts)
    require_room(settings, parameters_of(facts))
    if resumed:
        return []
    if faults := weight_faults(settings.model.path):
        raise ModelError(f"expected weights that can be trained at {settings.model.path}, got: {'; '.join(faults)}")
    if function := settings.evaluation.function:
        load_function(function)
    algorithm_of(settings.algorithm)  # a user's own algorithm may be missing, or refuse its options
    open_window(settings.loop, settings.ingest, lambda: 0)  # a user's own priority function may be missing
    enter("trying optional features")
    asyncio.run(_try_features(settings))
    enter("loading the tokenizer")
    tokenizer = ModelTokenizer(settings.model.path, settings.data.chat_template_kwargs)
    notes = [note for feature in features() for note in feature.start.notes(settings)]
    notes += [] if facts.ends.ids or settings.loop.stop else [never_ends(settings)]
    if settings.data.requests_only:
        return notes
    enter("opening the prompts")
    prompts = SampledPrompts(settings)
    enter(f"reading {min(MOST_PROMPTS, prompts.total):,} of {prompts.total:,} prompts")
    sample = [*prompts.first(MOST_PROMPTS, PROMPTS_PATIENCE_S)]
    found = survey_of(settings, tokenizer, facts, sample)
    refused = f"{found.refused_count:,} of {found.checked:,} prompts"
    if found.checked < prompts.total:
        refused += f" (sampled from {prompts.total:,})"
    if refuses_too_many(found):
        raise ModelError(_too_many_refused(found, refused))
    enter(f"calling the reward functions for {min(REWARD_ROWS, len(sample))} rows")
    asyncio.run(_tried_rewards(settings, sample[:REWARD_ROWS], writer_of(settings, tokenizer)))
    warnings = [*notes, *(f"data: {note}" for note in prompts.notes)]
    return [*warnings, *([f"{refused} will be refused and skipped: {found.causes()}"] if found.refused else [])]


async def _try_features(settings: Settings) -> None:
    for feature in features():
        await feature.start.try_out(settings)


async def _tried_rewards(
    settings: Settings, prompts: Sequence[Prompt], writer: Writer, place: str = ""
) -> list[RewardTrial]:
    """The trials of all functions; ``place``: the set of the prompts, for errors.

    Raises:
        RewardLoadError: so many rows have no reward that a run would stop because of it.
    """
    trials = await try_rewards(settings.rewards, prompts, REWARDS_PATIENCE_S, writer)
    for trial in trials.functions:
        if fails_too_often(trial, settings):
            raise RewardLoadError(
                f"expected reward {trial.name} to score completions{place}, got errors on {len(trial.lost)} of "
                f"{trial.rows} rows, the first: {trial.first_error}; fix the function, or raise "
                "ingest.max_unrewarded_share"
            )
    if rewards_too_few(trials, settings):
        raise RewardLoadError(
            f"expected rewards for completions{place}, got None from each function on {trials.unrewarded_rows()}; "
            "give these rows an answer, leave them out with data.filter, or raise ingest.max_unrewarded_share"
        )
    return trials.functions


def main() -> None:
    """Run the check in the child process: read settings as JSON from standard input, write the answer as JSON."""
    # Libraries and the user's modules may print. Their output must not mix with the answer.
    answer_to, sys.stdout = sys.stdout, sys.stderr
    settings = Settings.model_validate_json(sys.stdin.read())
    answer: dict[str, object] = {"refusal": None, "warnings": []}
    try:
        stage = Path(sys.argv[1])
        answer["warnings"] = checked(
            settings, resumed="resumed" in sys.argv, enter=lambda text: write_atomically(stage, text)
        )
    except UserError as error:
        answer["refusal"] = str(error)
    except StreamRLError as error:
        answer["warnings"] = [f"the task could not be checked completely: {error}"]
    json.dump(answer, answer_to)


if __name__ == "__main__":
    main()
