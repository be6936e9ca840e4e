"""`streamrl run --dry-run`: what can go wrong before a run starts, as a checklist.

Each check uses the code that the run itself will use (data source, tokenizer, reward runner, engine factory, topics)
and leaves nothing behind: no topic is created, no weights are loaded, files written on trial are removed. A check
that raises is a failed line, and the others go on.
"""

import asyncio
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from streamrl.bus.embedded import detached
from streamrl.bus.embedded.jars import KAFKA_VERSION, MEGABYTE, missing_jars
from streamrl.bus.embedded.runtime import cache_root, find_java
from streamrl.bus.kafka.topic_admin import diff_topics
from streamrl.consumers.training.checkpoints.storage import REMOTE, open_storage
from streamrl.consumers.training.model import require_weights, resolve_device
from streamrl.deploy.local.task_check import (
    REWARD_ROWS,
    REWARDS_PATIENCE_S,
    SampledPrompts,
    disk_room,
    fails_too_often,
    is_pointless,
    must_be_writable,
    parameters_of,
    require_engine,
)
from streamrl.inspection.environment import read_machine
from streamrl.observability.metrics.tracking import try_trackers
from streamrl.producers.generation.engines.model_files import UNLIMITED, ModelFacts, read_facts
from streamrl.producers.generation.prompt_survey import survey
from streamrl.producers.generation.tokenizer import ModelTokenizer
from streamrl.producers.rewards.trial import RewardTrial, try_rewards
from streamrl.schemas.errors import CheckpointError, StreamRLError, UserError
from streamrl.schemas.import_path import load_function
from streamrl.schemas.trajectories import Prompt
from streamrl.settings.features import Feature, features
from streamrl.settings.placement import for_machine, place
from streamrl.settings.run_directory import named
from streamrl.settings.tree import Settings

MOST_PROMPTS = 20_000
PROMPTS_PATIENCE_S = 15.0
"""So many prompts are tokenised, or what can be done in that time: all of most data sets, and a sample of others."""
MAX_SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class Check:
    """One line of the checklist. ``note``: worth knowing, and no reason not to start."""

    subject: str
    state: Literal["ok", "note", "fail"]
    detail: str

    def __str__(self) -> str:
        mark = "FAIL" if self.state == "fail" else self.state
        return f"{mark:<5} {self.subject:<12} {' '.join(self.detail.split())}"


Report = Callable[[str], None]
Result = TypeVar("Result")
CheckResult = Check | Sequence[Check]
CheckFunction = Callable[[], CheckResult | Coroutine[Any, Any, Sequence[Check]]]


class Checklist:
    """Reports each line as it comes; a check that raises is a failed line, and the others go on."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.checks: list[Check] = []

    def add(self, *checks: Check) -> None:
        """Report lines."""
        self.checks += checks
        for check in checks:
            self._report(str(check))

    def attempt(self, subject: str, check: Callable[[], Result]) -> Result | None:
        """What ``check`` returns, or None after a line that says why there is nothing."""
        try:
            return check()
        except StreamRLError as error:  # ours say in words what was expected; of others the class tells half of it
            self.add(Check(subject, "fail", str(error)))
        except Exception as error:
            self.add(Check(subject, "fail", f"{type(error).__name__}: {error}"))
        return None

    def run(self, subject: str, check: CheckFunction) -> None:
        """Carry out a check, which may be asynchronous."""

        def finished() -> CheckResult:
            result = check()
            # A loop for each check: what a failed one leaves behind is cancelled with its loop.
            return asyncio.run(result) if isinstance(result, Coroutine) else result

        result = self.attempt(subject, finished)
        if result is not None:
            self.add(*([result] if isinstance(result, Check) else result))


def dry_run(settings: Settings, report: Report) -> int:
    """Check everything; 0, or 2 if something would go wrong."""
    settings, machine = named(settings), read_machine()
    checklist = Checklist(report)
    checklist.add(Check("settings", "ok", f"run {settings.run.name}, in {settings.run.path}/"))
    if (fitted := checklist.attempt("placement", lambda: for_machine(settings, machine))) is not None:
        settings = fitted
        checklist.run("placement", lambda: Check("placement", "ok", "; ".join(place(fitted, machine).lines())))
    emulated = settings.generation.engine == "emulated"
    if settings.data.requests_only:
        checklist.add(
            Check("data", "ok", "no prompts: requesters of the gateway and environments bring what is trained")
        )
    prompts = None if settings.data.requests_only else checklist.attempt("data", lambda: SampledPrompts(settings))
    first = checklist.attempt("data", lambda: [*prompts.first(REWARD_ROWS, PROMPTS_PATIENCE_S)]) if prompts else None
    if first:
        checklist.run("data", lambda: check_prompts(first))
    # An emulated run has neither a model nor real rewards: there is nothing of them to check.
    size = 0 if emulated else _model(checklist, settings, prompts if first else None)
    if first and not emulated:
        checklist.run("rewards", lambda: check_rewards(settings, first))
    _surroundings(checklist, settings, size)
    report(closing_line(checklist.checks))
    return 2 if any(check.state == "fail" for check in checklist.checks) else 0


def closing_line(checks: Sequence[Check]) -> str:
    """The last line: how many checks ended how, and which of them are worth a look."""
    by_state = {state: [check.subject for check in checks if check.state == state] for state in ("ok", "note", "fail")}
    parts = [f"{len(by_state['ok'])} ok"]
    if notes := by_state["note"]:
        parts.append(f"{len(notes)} note{'s' * (len(notes) > 1)} ({_once(notes)})")
    if failed := by_state["fail"]:
        parts.append(f"{len(failed)} failed ({_once(failed)})")
    return f"{len(checks)} checks: {', '.join(parts)}; nothing was started"


def _once(subjects: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(subjects))


def _model(checklist: Checklist, settings: Settings, prompts: SampledPrompts | None) -> int:
    """Parameters of the model; 0 if it cannot be had."""
    facts = checklist.attempt("model", lambda: read_model(settings))
    if facts is not None:
        checklist.run("model", lambda: check_model(facts, settings.model.path))
        if prompts:
            sample = prompts.first(MOST_PROMPTS, PROMPTS_PATIENCE_S)
            checklist.run("lengths", lambda: check_lengths(settings, sample, facts, prompts.total))
    # Also without a model: a library or a device that is missing is a second mistake, told in the same go.
    checklist.run("engine", lambda: check_engine(settings, facts))
    return 0 if facts is None else parameters_of(facts)


def _surroundings(checklist: Checklist, settings: Settings, parameters: int) -> None:
    if function := settings.evaluation.function:
        checklist.run("evaluation", lambda: _check_evaluation(function))
    for feature in features():
        checklist.run(feature.name, partial(_try_out, feature, settings))
    if settings.tracking.to:
        checklist.run("tracking", lambda: _check_tracking(settings))
    checklist.run("broker", lambda: check_broker(settings))
    checklist.run("storage", lambda: check_storage(settings, parameters))


def _check_evaluation(path: str) -> Check:
    load_function(path)
    return Check("evaluation", "ok", f"{path} can be imported")


async def _try_out(feature: Feature, settings: Settings) -> list[Check]:
    found = await feature.start.try_out(settings)
    return [] if found is None else [Check(feature.name, "ok", found)]


def _check_tracking(settings: Settings) -> Check:
    try_trackers(settings.tracking)
    for name in settings.tracking.to:
        must_be_writable(settings.run.path / "tracking" / name)
    return Check("tracking", "ok", f"{', '.join(settings.tracking.to)}: imported; their files can be written")


async def check_broker(settings: Settings) -> list[Check]:
    """The broker that the run would use.

    Raises:
        BrokerError: it does not answer, or there is no Java to start one.
    """
    # In the order in which a run looks: the one that is named, one that was left running here, else one of its own.
    address = settings.kafka.bootstrap_servers or detached.left_running()
    if address is None:
        return [_embedded()]
    kafka = settings.kafka.model_copy(update={"bootstrap_servers": address})
    partitions = settings.loop.trajectory_partitions
    changes = await diff_topics(address, settings.run.name, partitions, kafka.replication_factor, kafka)
    # What is missing or set otherwise a run mends by itself; a conflict is what it does not.
    conflicts = [change for change in changes if change.kind == "conflict"]
    if conflicts:
        return [Check("broker", "fail", f"{address}: {change}") for change in conflicts]
    return [Check("broker", "ok", f"{address} answers; topics to create or change: {len(changes)}")]


def _embedded() -> Check:
    java = find_java()
    missing = missing_jars(cache_root() / "runtime" / f"kafka-{KAFKA_VERSION}" / "jars")
    if missing:
        size = sum(jar.size for jar in missing) // MEGABYTE
        return Check(
            "broker", "note", f"Kafka {KAFKA_VERSION} would be downloaded first: {len(missing)} jars, {size} MB"
        )
    return Check("broker", "ok", f"none named: Kafka {KAFKA_VERSION} would be started here, on Java {java.version}")


def check_model(facts: ModelFacts, path: str) -> Check:
    """Its family, size and context.

    Raises:
        ModelError: its weights are not there, not whole, or another model's.
    """
    require_weights(path)
    positions = "unlimited positions" if facts.max_length == UNLIMITED else f"{facts.max_length} positions"
    family = ", ".join(getattr(facts.config, "architectures", None) or [type(facts.config).__name__])
    size = f"{parameters_of(facts) / 1e6:.3g} million parameters"
    return Check("model", "ok", f"{path}: {family}, {size}, vocabulary {facts.vocab_size}, {positions}")


def read_model(settings: Settings) -> ModelFacts:
    """What its configuration says.

    Raises:
        ModelError: there is no such model.
    """
    return read_facts(settings.model.path, settings.generation.max_model_len)


def check_lengths(
    settings: Settings, prompts: Iterable[Prompt], facts: ModelFacts, total: int | None = None
) -> list[Check]:
    """Renders the prompts as a worker does and compares their lengths with the settings' and the model's.

    ``total``: prompts of which these are a sample. Refused ones fail only if hardly any other is left, as in a run.

    Raises:
        ModelError: there is no tokenizer.
    """
    loop = settings.loop
    bound = min(loop.max_prompt_length, facts.max_length - 1)  # a completion needs a position behind its prompt
    found = survey(ModelTokenizer(settings.model.path, settings.data.chat_template_kwargs), prompts, bound)
    sample = f" (a sample of {total:,})" if total and found.checked < total else ""
    checks: list[Check] = []
    if found.lengths:
        shortest, longest = min(found.lengths.values()), max(found.lengths.values())
        said = f"{shortest} to {longest} tokens in {len(found.lengths):,} prompts{sample}, at most {bound} allowed"
        checks.append(Check("lengths", "ok", said))
    if found.refused:
        state: Literal["note", "fail"] = "fail" if is_pointless(found, settings.ingest.max_refused_share) else "note"
        advice = "raise loop.max_prompt_length" if bound < facts.max_length - 1 else "take a model with more positions"
        advice = f"{advice}, or leave them out by data.filter" if f"longer than {bound} tokens" in found.refused else ""
        detail = f"{found.refused_count:,} of {found.checked:,} prompts{sample} would be refused: {found.causes()}"
        checks.append(Check("lengths", state, f"{detail}; {advice}" if advice else detail))
    if found.lengths and (room := facts.max_length - longest) < loop.max_completion_length:
        which = next(name for name, length in found.lengths.items() if length == longest)
        cut = f"after {which} only {room} of loop.max_completion_length = {loop.max_completion_length} tokens fit"
        checks.append(Check("lengths", "note", f"{cut} into the model's {facts.max_length} positions"))
    return checks


def check_engine(settings: Settings, facts: ModelFacts | None) -> Check:
    """Whether the engine is installed and takes the model, and the devices asked for are there.

    Raises:
        ModelError: one of it is not so.
    """
    require_engine(settings, facts)
    where = f"training on {resolve_device(settings.training)}" if settings.run.trainer else "a trainer joins"
    engine = (
        f"{settings.generation.engine} is installed"
        if settings.run.workers or settings.run.max_workers
        else "workers join"
    )
    return Check("engine", "ok", f"{engine}; {where}")


def check_storage(settings: Settings, parameters: int) -> list[Check]:
    """Directory, checkpoints and disk; ``parameters`` of the model, 0 where none is trained.

    Raises:
        UserError: a directory cannot be written.
    """
    return [_checkpoints(settings), _disk(settings, parameters)]


def _checkpoints(settings: Settings) -> Check:
    location = settings.checkpoint_location
    with tempfile.TemporaryDirectory(prefix="streamrl-dry-run-") as cache:
        storage = open_storage(location, Path(cache))
        # A remote place has no directory to write into on trial; that it can be listed has to do.
        if not (isinstance(location, str) and REMOTE.fullmatch(location)):
            must_be_writable(Path(location))
        try:
            steps = [slot.step for slot in storage.slots()]
        except (OSError, CheckpointError) as error:
            raise UserError(f"expected to list checkpoints at {location}, got: {error}") from error
    if steps:
        is_over = max(steps) >= settings.training.max_steps
        then = "that is the last step, nothing would be trained" if is_over else "the run would go on there"
        return Check("checkpoints", "note", f"{location} holds some up to step {max(steps)}; {then}")
    return Check("checkpoints", "ok", f"{location} can be {'reached' if '://' in str(location) else 'written'}")


def _disk(settings: Settings, parameters: int) -> Check:
    room = disk_room(settings, parameters)
    return Check("disk", "ok" if room.is_enough else "fail", str(room))


def check_prompts(prompts: Sequence[Prompt]) -> Check:
    """What the first of them is, and which columns the rewards get."""
    first = prompts[0]
    text = first.text if len(first.text) <= MAX_SHOWN_CHARACTERS else first.text[:MAX_SHOWN_CHARACTERS] + "…"
    columns = ", ".join(sorted(first.columns)) or "none"
    return Check("data", "ok", f"every row can be read; {first.prompt_id} is {text!r}; columns for rewards: {columns}")


async def check_rewards(settings: Settings, prompts: Sequence[Prompt]) -> list[Check]:
    """What each function says of these rows, as far as there is patience.

    Raises:
        RewardLoadError: one cannot be loaded.
    """
    trials = await try_rewards(settings.rewards, prompts, REWARDS_PATIENCE_S)
    return [_reward_check(trial, prompts[0], settings) for trial in trials]


def _reward_check(trial: RewardTrial, first: Prompt, settings: Settings) -> Check:
    if trial.failed:
        state: Literal["note", "fail"] = "fail" if fails_too_often(trial, settings) else "note"
        said = f"{trial.name} fails on {len(trial.failed)} of {trial.rows} rows ({trial.share:.0%})"
        bound = f"above ingest.max_unrewarded_share ({settings.ingest.max_unrewarded_share:.0%}) a run ends"
        return Check("rewards", state, f"{said}, first on {trial.first_error}; {bound}")
    tried = f" (tried on {trial.rows} rows)" if trial.rows > 1 else ""
    # Shown of the first row on which it tells the two apart, if there is one.
    telling = (name for name, (answer, nothing) in trial.pairs.items() if answer != nothing)
    shown = next(telling, first.prompt_id)
    what = f"the answer of {shown}" if "answer" in first.columns else "a sample completion"
    values = trial.pairs[shown]
    if values == (None, None):
        return Check("rewards", "note", f"{trial.name} gives no reward (None) for {what}, nor for nothing{tried}")
    said = f"{trial.name} gives {_shown(values[0])} for {what}, {_shown(values[1])} for nothing{tried}"
    if values[0] == values[1]:
        return Check("rewards", "note", f"{said}: can it tell a good completion from a bad one?")
    return Check("rewards", "ok", said)


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
