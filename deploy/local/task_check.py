"""Whether a run's task can be trained at all: a look at its prompts, its tokenizer and its rewards before it starts.

It is carried out in a process of its own, which ends before the run begins: a tokenizer brings along libraries of half
a gigabyte, which the supervisor would keep for the whole run. ``streamrl run --dry-run`` looks at more, by the same
parts.

Invariant a_pointless_run_is_refused: with prompts of which (nearly) none can be sampled, a model without tokenizer, or
a reward that scores nothing, no broker is started and nothing is written.
"""

import asyncio
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sized
from pathlib import Path

import structlog

from consumers.algorithms.shelf import algorithm_of
from consumers.ingest.sampling import open_window
from producers.generation.prompt_survey import PromptSurvey, survey
from producers.prompts.sources import open_source
from producers.rewards.trial import try_rewards
from schemas.errors import ModelError, RewardLoadError, StreamRLError, UserError
from schemas.trajectories import Prompt
from settings.tree import Settings

log = structlog.get_logger()

MOST_PROMPTS = 256
PROMPTS_PATIENCE_S = 3.0
REWARD_ROWS = 4
REWARDS_PATIENCE_S = 10.0
"""Enough for what fails always: the dry run looks for what fails sometimes."""
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


def check_task(settings: Settings) -> list[str]:
    """What is worth a warning before this run.

    Raises:
        UserError: the run would be pointless, and why.
    """
    command = [sys.executable, "-P", "-m", "deploy.local.task_check"]
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
        )
        answer = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        log.warning("the task was not checked before its start", error=str(error)[:300])
        return []
    if (refusal := answer["refusal"]) is not None:
        raise UserError(refusal)
    warnings: list[str] = answer["warnings"]
    return warnings


def checked(settings: Settings) -> list[str]:
    """The check itself; see ``check_task``."""
    from producers.generation.engines.model_files import read_context
    from producers.generation.tokenizer import ModelTokenizer

    algorithm_of(settings.algorithm)  # one of the user's own may not be there, or not take its options
    open_window(settings.loop, settings.ingest, lambda: 0)  # nor may a priority
    tokenizer = ModelTokenizer(settings.model.path, settings.data.chat_template_kwargs)
    if settings.data.requests_only:
        return []
    prompts = SampledPrompts(settings)
    context = read_context(settings.model.path, settings.generation.max_model_len)
    sample = [*prompts.first(MOST_PROMPTS, PROMPTS_PATIENCE_S)]
    found = survey(tokenizer, sample, min(settings.loop.max_prompt_length, context - 1))
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


async def _check_rewards(settings: Settings, prompts: list[Prompt]) -> None:
    for trial in await try_rewards(settings.rewards, prompts, REWARDS_PATIENCE_S):
        if trial.rows and len(trial.errors) == 2 * trial.rows:
            raise RewardLoadError(
                f"expected reward {trial.name} to score a completion, got an error for each of "
                f"{len(trial.errors)}, the first: {trial.first_error}; mend the function"
            )


def main() -> None:
    """Settings as JSON from standard input; the answer as JSON on standard output."""
    # Whatever a library or a user's module prints must not get into the answer.
    answer_to, sys.stdout = sys.stdout, sys.stderr
    settings = Settings.model_validate_json(sys.stdin.read())
    answer: dict[str, object] = {"refusal": None, "warnings": []}
    try:
        answer["warnings"] = checked(settings)
    except UserError as error:
        answer["refusal"] = str(error)
    except StreamRLError as error:
        answer["warnings"] = [f"not all of the task could be checked: {error}"]
    json.dump(answer, answer_to)


if __name__ == "__main__":
    main()
