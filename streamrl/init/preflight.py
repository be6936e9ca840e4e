"""`streamrl run --dry-run`: a checklist of problems that can be found before a run starts.

Each check uses the code of the run itself (data source, tokenizer, reward runner, engine factory, topics) and leaves
nothing behind: it creates no topic, loads no weights, and removes its trial files. A check that raises becomes a failed
line, and the others continue.
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
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.deploy.local.task_check import (
    REWARD_ROWS,
    REWARDS_PATIENCE_S,
    SampledPrompts,
    disk_room,
    fails_too_often,
    longest_prompt,
    never_ends,
    parameters_of,
    refuses_too_many,
    require_engine,
    require_extras,
    require_writable,
    rewards_too_few,
    survey_of,
    writer_of,
)
from streamrl.init.precision import slow_bfloat16
from streamrl.inspection.environment import read_machine
from streamrl.observability.metrics.tracking import try_trackers
from streamrl.producers.generation.engines.model_files import UNLIMITED, ModelFacts, read_facts
from streamrl.producers.generation.tokenizer import ModelTokenizer
from streamrl.producers.prompts.columns import COMPARING
from streamrl.producers.rewards.trial import RewardTrial, RewardTrials, TriedRow, made_up, try_rewards
from streamrl.schemas.errors import CheckpointError, StreamRLError, UserError
from streamrl.schemas.import_path import load_function
from streamrl.schemas.trajectories import Prompt
from streamrl.settings.features import Feature, features
from streamrl.settings.placement import for_machine, place
from streamrl.settings.run_directory import named
from streamrl.settings.tree import Settings

PROMPTS_PATIENCE_S = 60.0
"""Most seconds in which prompts are read and tokenised: all of most data sets, and a sample of larger ones."""
SHOWN_ROWS = 5
MEDIA = {"image", "images", "video", "videos", "audio", "audios"}
"""Columns that other libraries show to the model."""
MAX_SHOWN_CHARACTERS = 60
"""Most characters of a prompt's start, and of its end, that are shown."""


@dataclass(frozen=True)
class Check:
    """One line of the checklist. ``note``: worth knowing, but the run can start."""

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
    """Runs checks and reports each line at once; a check that raises becomes a failed line, and the others continue."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.checks: list[Check] = []

    def add(self, *checks: Check) -> None:
        """Report lines."""
        self.checks += checks
        for check in checks:
            self._report(str(check))

    def show(self, line: str) -> None:
        """Report a line that is not a check."""
        self._report(f"      {line}")

    def attempt(self, subject: str, check: Callable[[], Result]) -> Result | None:
        """The result of ``check``; None if it raised, after a line with the error."""
        try:
            return check()
        except StreamRLError as error:  # its text explains itself; other errors need the name of their class
            self.add(Check(subject, "fail", str(error)))
        except Exception as error:
            self.add(Check(subject, "fail", f"{type(error).__name__}: {error}"))
        return None

    def run(self, subject: str, check: CheckFunction) -> None:
        """Run a check, which may be asynchronous, and report its lines."""

        def run_check() -> CheckResult:
            result = check()
            # Each check gets its own event loop, which cancels tasks that a failed check leaves behind.
            return asyncio.run(result) if isinstance(result, Coroutine) else result

        result = self.attempt(subject, run_check)
        if result is not None:
            self.add(*([result] if isinstance(result, Check) else result))


def dry_run(settings: Settings, report: Report) -> int:
    """Check everything and report it; returns 0, or 2 if a check failed."""
    settings, machine = named(settings), read_machine()
    checklist = Checklist(report)
    checklist.add(Check("settings", "ok", f"run {settings.run.name}, in {settings.run.path}/"))
    if (fitted := checklist.attempt("placement", lambda: for_machine(settings, machine))) is not None:
        settings = fitted
        checklist.run("placement", lambda: Check("placement", "ok", "; ".join(place(fitted, machine).lines())))
    emulated = settings.generation.engine == "emulated"
    if settings.data.requests_only:
        checklist.add(Check("data", "ok", "no prompts: trajectories come from gateway requests and environments"))
    prompts = None if settings.data.requests_only else checklist.attempt("data", lambda: SampledPrompts(settings))
    first = checklist.attempt("data", lambda: [*prompts.first(REWARD_ROWS, PROMPTS_PATIENCE_S)]) if prompts else None
    if first and prompts is not None:
        checklist.run("data", lambda: check_prompts(first, prompts.total, prompts.left_out))
        checklist.run("data", lambda: check_amount(settings, prompts.total))
    # An emulated run has neither a model nor real rewards, so these are not checked.
    tokenizer = None if emulated else checklist.attempt("tokenizer", lambda: read_tokenizer(settings))
    size = 0 if emulated else _model(checklist, settings, tokenizer, prompts if first else None)
    if first and tokenizer is not None:
        checklist.run("tokenizer", lambda: check_rendering(tokenizer, first))
    if first and not emulated:
        checklist.run("rewards", lambda: check_rewards(settings, first, tokenizer, checklist.show))
    _surroundings(checklist, settings, size)
    report(closing_line(checklist.checks))
    return 2 if any(check.state == "fail" for check in checklist.checks) else 0


def closing_line(checks: Sequence[Check]) -> str:
    """The last line: the number of checks by result, with the subjects of notes and failures."""
    by_state = {state: [check.subject for check in checks if check.state == state] for state in ("ok", "note", "fail")}
    parts = [f"{len(by_state['ok'])} ok"]
    if notes := by_state["note"]:
        parts.append(f"{len(notes)} note{'s' * (len(notes) > 1)} ({_distinct(notes)})")
    if failed := by_state["fail"]:
        parts.append(f"{len(failed)} failed ({_distinct(failed)})")
    return f"{len(checks)} checks: {', '.join(parts)}; nothing was started"


def _distinct(subjects: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(subjects))


def _model(
    checklist: Checklist, settings: Settings, tokenizer: ModelTokenizer | None, prompts: SampledPrompts | None
) -> int:
    """The model's number of parameters; 0 if the model cannot be read."""
    facts = checklist.attempt("model", lambda: read_model(settings))
    if facts is not None:
        checklist.run("model", lambda: check_model(facts, settings.model.path))
        checklist.run("model", lambda: check_tokens(settings, facts))
    if facts is not None and tokenizer is not None:
        checklist.run("tokenizer", lambda: check_context(settings, tokenizer, facts))
        if prompts:
            sample = prompts.first(prompts.total, PROMPTS_PATIENCE_S)
            checklist.run("lengths", lambda: check_lengths(settings, tokenizer, sample, facts, prompts.total))
    # Checked without a model, too, so that a missing library or device is reported together with a missing model.
    checklist.run("engine", lambda: check_engine(settings, facts))
    checklist.run("precision", lambda: check_precision(settings, facts))
    return 0 if facts is None else parameters_of(facts)


def _surroundings(checklist: Checklist, settings: Settings, parameters: int) -> None:
    if function := settings.evaluation.function:
        checklist.run("evaluation", lambda: _check_evaluation(function))
    for feature in features():
        checklist.run(feature.name, partial(_try_out, feature, settings))
    checklist.attempt("packages", lambda: require_extras(settings))
    if settings.tracking.to:
        checklist.run("tracking", lambda: _check_tracking(settings))
    checklist.run("broker", lambda: check_broker(settings))
    checklist.run("storage", lambda: check_storage(settings, parameters))


def _check_evaluation(path: str) -> Check:
    load_function(path)
    return Check("evaluation", "ok", f"{path} can be imported")


async def _try_out(feature: Feature, settings: Settings) -> list[Check]:
    found = await feature.start.try_out(settings)
    notes = [Check(feature.name, "note", note) for note in feature.start.notes(settings)]
    return [*notes, *([] if found is None else [Check(feature.name, "ok", found)])]


def _check_tracking(settings: Settings) -> Check:
    try_trackers(settings.tracking)
    for name in settings.tracking.to:
        require_writable(settings.run.path / "tracking" / name)
    return Check("tracking", "ok", f"{', '.join(settings.tracking.to)}: can be imported and write files")


async def check_broker(settings: Settings) -> list[Check]:
    """Checks of the broker that the run would use.

    Raises:
        BrokerError: the broker does not answer, or there is no Java to start one.
    """
    # In the order of a run: the configured broker, one that was left running here, else the run's own.
    address = settings.kafka.bootstrap_servers or detached.running_bootstrap_servers()
    if address is None:
        return [_embedded()]
    kafka = settings.kafka.model_copy(update={"bootstrap_servers": address})
    partitions = settings.loop.trajectory_partitions
    changes = await diff_topics(address, settings.run.name, partitions, kafka.replication_factor, kafka)
    # A run creates missing topics and corrects their settings itself; it does not resolve conflicts.
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
    return Check("broker", "ok", f"none given: Kafka {KAFKA_VERSION} would be started here, on Java {java.version}")


def check_model(facts: ModelFacts, path: str) -> Check:
    """A check of the model's weights, with its family, size, context and ends.

    Raises:
        ModelError: the weights are missing, incomplete, or those of another model.
    """
    unused = require_weights(path)
    positions = "unlimited positions" if facts.max_length == UNLIMITED else f"{facts.max_length} positions"
    family = ", ".join(getattr(facts.config, "architectures", None) or [type(facts.config).__name__])
    size = f"{parameters_of(facts) / 1e6:.3g} million parameters"
    kind = f"{path}: {family}, {size}, vocabulary {facts.vocab_size}, {positions}"
    if unused:
        kind += f"; it has no place for {len(unused)} tensors of its files, such as {unused[0]}: look at config.json"
    return Check("model", "note" if unused else "ok", f"{kind}; a completion ends at {facts.ends}")


def check_tokens(settings: Settings, facts: ModelFacts) -> list[Check]:
    """Notes on a model without an end, on a tokenizer that is larger than the model, and on too long a context."""
    notes = [] if facts.ends.ids or settings.loop.stop else [never_ends(settings)]
    if facts.tokenizer_size > facts.vocab_size:
        sizes = f"the tokenizer has token ids up to {facts.tokenizer_size - 1}, the model up to {facts.vocab_size - 1}"
        notes.append(f"{sizes}: prompts with larger ones will be refused")
    wanted = settings.generation.max_model_len
    if wanted is not None and wanted > facts.max_length:
        notes.append(f"generation.max_model_len = {wanted} is more than the model's {facts.max_length} positions")
    return [Check("model", "note", note) for note in notes]


def read_model(settings: Settings) -> ModelFacts:
    """The facts in the model's configuration.

    Raises:
        ModelError: the model does not exist.
    """
    return read_facts(settings.model.path, settings.generation.max_model_len)


def read_tokenizer(settings: Settings) -> ModelTokenizer:
    """The model's tokenizer.

    Raises:
        ModelError: there is none, or its chat template does not read a variable of the settings.
    """
    return ModelTokenizer(settings.model.path, settings.data.chat_template_kwargs)


def check_context(settings: Settings, tokenizer: ModelTokenizer, facts: ModelFacts) -> list[Check]:
    """A note if the tokenizer names a shorter context than the model has and the run may use."""
    longest = settings.loop.max_prompt_length + settings.loop.max_completion_length
    names: int = tokenizer.transformers_tokenizer.model_max_length
    if names >= min(longest, facts.max_length):
        return []
    detail = f"the tokenizer's context is {names} tokens, prompt and completion may have {longest}"
    return [Check("tokenizer", "note", f"{detail}: lower loop.max_completion_length if the model was trained with it")]


def check_rendering(tokenizer: ModelTokenizer, prompts: Sequence[Prompt]) -> list[Check]:
    """A note if the tokenizer loses a part of a prompt, such as characters that it does not know."""
    changed = []
    for prompt in prompts:
        text = (prompt.content if isinstance(prompt.content, str) else prompt.content[-1].content).strip()
        rendered = rendered_by(tokenizer, prompt)
        if rendered is not None and text not in rendered:
            changed.append((prompt.prompt_id, text, rendered))
    if not changed:
        return []
    name, text, rendered = changed[0]
    detail = f"{len(changed)} of {len(prompts)} prompts are changed by the tokenizer or its chat template"
    return [Check("tokenizer", "note", f"{detail}, first {name}: {_cut(text)} becomes {_cut(rendered)}")]


def rendered_by(tokenizer: ModelTokenizer, prompt: Prompt) -> str | None:
    """The prompt's text as the model sees it, with special tokens; None if it cannot be tokenised."""
    try:
        return tokenizer.decode_with_special(tokenizer.encode_prompt(prompt))
    except Exception:  # chat templates raise anything; the check of lengths says what
        return None


def check_lengths(
    settings: Settings,
    tokenizer: ModelTokenizer,
    prompts: Iterable[Prompt],
    facts: ModelFacts,
    total: int | None = None,
) -> list[Check]:
    """Checks that compare the prompts' lengths, rendered as a worker does, with the limits of settings and model.

    ``total``: number of all prompts, if these are a sample. Prompts that a worker would refuse fail the check only if
    hardly any others are left, as in a run.
    """
    loop, bound = settings.loop, longest_prompt(settings, facts)
    found = survey_of(settings, tokenizer, facts, prompts)
    sample = f" (sampled from {total:,})" if total and found.checked < total else ""
    checks: list[Check] = []
    if found.lengths:
        shortest, longest = min(found.lengths.values()), max(found.lengths.values())
        detail = f"{shortest} to {longest} tokens in {len(found.lengths):,} prompts{sample}, at most {bound} allowed"
        checks.append(Check("lengths", "ok", detail))
    if found.refused:
        state: Literal["note", "fail"] = "fail" if refuses_too_many(found) else "note"
        advice = "raise loop.max_prompt_length" if bound < facts.max_length - 1 else "use a model with more positions"
        too_long = f"longer than {bound} tokens" in found.refused
        advice = f"{advice}, or leave them out with data.filter" if too_long else ""
        detail = f"{found.refused_count:,} of {found.checked:,} prompts{sample} would be refused: {found.causes()}"
        checks.append(Check("lengths", state, f"{detail}; {advice}" if advice else detail))
    if found.lengths and (room := facts.max_length - longest) < loop.max_completion_length:
        which = next(name for name, length in found.lengths.items() if length == longest)
        cut = f"after {which} only {room} of loop.max_completion_length = {loop.max_completion_length} tokens fit"
        checks.append(Check("lengths", "note", f"{cut} into the model's {facts.max_length} positions"))
    return checks


def check_engine(settings: Settings, facts: ModelFacts | None) -> Check:
    """A check that the engine is installed and supports the model, and that the configured devices exist.

    Raises:
        ModelError: one of these does not hold.
    """
    require_engine(settings, facts)
    where = f"training on {resolve_device(settings.training)}" if settings.run.trainer else "trainer started elsewhere"
    engine = (
        f"{settings.generation.engine} is installed"
        if settings.run.workers or settings.run.max_workers
        else "workers started elsewhere"
    )
    return Check("engine", "ok", f"{engine}; {where}")


def check_precision(settings: Settings, facts: ModelFacts | None) -> list[Check]:
    """A note if the settings ask for bfloat16 on a processor that is much slower in it."""
    asking = _in_bfloat16_on_cpu(settings, facts)
    if not asking or (measured := slow_bfloat16()) is None:
        return []
    advice = " and ".join(f'{key} = "float32"' for key in asking)
    return [Check("precision", "note", f"{measured}: set {advice}")]


def _in_bfloat16_on_cpu(settings: Settings, facts: ModelFacts | None) -> list[str]:
    """The settings with which processes of this machine compute in bfloat16 on the CPU."""
    training, generation = settings.training, settings.generation
    stored = None if facts is None else getattr(facts.config.get_text_config(), "dtype", None)
    sampled_in = str(stored).removeprefix("torch.") if generation.dtype == "auto" else generation.dtype
    found = []
    if settings.run.trainer and training.dtype == "bfloat16" and _is_cpu(training):
        found.append("training.dtype")
    has_workers = settings.run.workers or settings.run.max_workers
    if has_workers and sampled_in == "bfloat16" and _is_cpu(training.model_copy(update={"device": generation.device})):
        found.append("generation.dtype")
    return found


def _is_cpu(training: TrainingSettings) -> bool:
    # A missing CUDA device is the engine check's to report.
    return training.device != "cuda" and resolve_device(training).type == "cpu"


def check_storage(settings: Settings, parameters: int) -> list[Check]:
    """Checks of directories, checkpoints and disk; ``parameters``: the model's, 0 if none is trained.

    Raises:
        UserError: a directory cannot be written.
    """
    return [_checkpoints(settings), _disk(settings, parameters)]


def _checkpoints(settings: Settings) -> Check:
    location = settings.checkpoint_location
    with tempfile.TemporaryDirectory(prefix="streamrl-dry-run-") as cache:
        storage = open_storage(location, Path(cache))
        # A remote location has no directory for a trial file; there, listing it must do.
        if not (isinstance(location, str) and REMOTE.fullmatch(location)):
            require_writable(Path(location))
        try:
            steps = [slot.step for slot in storage.slots()]
        except (OSError, CheckpointError) as error:
            raise UserError(f"expected to list checkpoints at {location}, got: {error}") from error
    if steps:
        is_over = max(steps) >= settings.training.max_steps
        then = "that is the last step, nothing would be trained" if is_over else "the run would continue from there"
        return Check("checkpoints", "note", f"{location} holds some up to step {max(steps)}; {then}")
    return Check("checkpoints", "ok", f"{location} can be {'reached' if '://' in str(location) else 'written'}")


def _disk(settings: Settings, parameters: int) -> Check:
    room = disk_room(settings, parameters)
    return Check("disk", "ok" if room.is_enough else "fail", str(room))


def check_prompts(prompts: Sequence[Prompt], total: int, left_out: str = "") -> Check:
    """A line with the number of prompts, the first one and the columns that rewards get; ``left_out``: rows that
    cannot be prompts.
    """
    first = prompts[0]
    text = first.text if len(first.text) <= MAX_SHOWN_CHARACTERS else first.text[:MAX_SHOWN_CHARACTERS] + "…"
    columns = ", ".join(sorted(first.columns)) or "none"
    shown = f"{first.prompt_id} is {text!r}; columns for rewards: {columns}"
    unseen = sorted({name for prompt in prompts for name in MEDIA & prompt.columns.keys() if prompt.columns[name]})
    notes = [left_out] if left_out else []
    if unseen:
        notes.append(f"the model sees text alone, and nothing of column {', '.join(unseen)}")
    return Check("data", "note" if notes else "ok", "; ".join([f"{total:,} prompts", *notes, shown]))


def check_amount(settings: Settings, total: int) -> list[Check]:
    """A note if one step takes more prompts than the data has."""
    wanted = settings.loop.groups_per_step
    if wanted <= total:
        return []
    detail = f"a step takes {wanted} prompts, the data has {total}: each step has the same prompts several times"
    return [Check("data", "note", f"{detail}; lower loop.groups_per_step, or give more data")]


async def check_rewards(
    settings: Settings,
    prompts: Sequence[Prompt],
    tokenizer: ModelTokenizer | None = None,
    show: Report = lambda line: None,
) -> list[Check]:
    """Checks that try each reward function on these rows, within a time limit; ``show`` gets the first rows.

    Raises:
        RewardLoadError: a function cannot be loaded.
    """
    writer = made_up if tokenizer is None else writer_of(settings, tokenizer)
    trials = await try_rewards(settings.rewards, prompts, REWARDS_PATIENCE_S, writer)
    for row in trials.rows[:SHOWN_ROWS]:
        show(_row_line(row, trials, tokenizer))
    checks = [_reward_check(trial, trials, settings) for trial in trials.functions]
    bound = f"above ingest.max_unrewarded_share ({settings.ingest.max_unrewarded_share:.0%}) a run stops"
    if trials.unrewarded and all(check.state != "fail" for check in checks):
        state: Literal["note", "fail"] = "fail" if rewards_too_few(trials, settings) else "note"
        checks.append(Check("rewards", state, f"no function pays anything on {trials.unrewarded_rows()}; {bound}"))
    if changed := [row for row in trials.rows if row.has_answer and row.is_changed]:
        first, count = changed[0], f"{len(changed)} of {len(trials.rows)}"
        became = f"first {first.prompt.prompt_id}: {_cut(first.text)} becomes {_cut(first.own[0])}"
        checks.append(Check("rewards", "note", f"rewards would see {count} answers changed by the tokenizer, {became}"))
    return checks


def _row_line(row: TriedRow, trials: RewardTrials, tokenizer: ModelTokenizer | None) -> str:
    """A row as model and rewards see it: the prompt, its answer, and the rewards of the answer."""
    prompt = row.prompt
    text = (rendered_by(tokenizer, prompt) if tokenizer else None) or prompt.text
    paid = ", ".join(
        f"{trial.name} {_shown(trial.rewards[prompt.prompt_id][0])}"
        if prompt.prompt_id in trial.rewards
        else f"{trial.name} fails"
        for trial in trials.functions
    )
    answer = f"answer {_cut(prompt.columns['answer'])}" if "answer" in prompt.columns else "no answer"
    return f"{prompt.prompt_id}  {_cut(text)}  {answer}  paid for itself: {paid}"


def _cut(value: Any) -> str:
    """The value's ``repr`` in one line, without the middle if it is long."""
    shown = repr(value)
    if len(shown) <= 2 * MAX_SHOWN_CHARACTERS:
        return shown
    return f"{shown[:MAX_SHOWN_CHARACTERS]} … {shown[-MAX_SHOWN_CHARACTERS:]}"


def _reward_check(trial: RewardTrial, trials: RewardTrials, settings: Settings) -> Check:
    state: Literal["ok", "note", "fail"]
    share = settings.ingest.max_unrewarded_share
    if trial.failed:
        state = "fail" if fails_too_often(trial, settings) else "note"
        failed = f"{trial.name} fails on {len(trial.failed)} of {trial.rows} rows ({trial.share:.0%})"
        bound = f"above ingest.max_unrewarded_share ({share:.0%}) a run stops"
        return Check("rewards", state, f"{failed}, first on {trial.first_error}; {bound}")
    answered = {row.prompt.prompt_id: row for row in trials.rows if row.has_answer}
    own, empty, *other = map("{:.3g}".format, trial.means())
    what = "a row's own answer" if answered else "a sample completion"
    another = f", {other[0]} for another row's" if other else ""
    detail = f"{trial.name} gives {own} for {what}{another}, {empty} for an empty completion ({trial.rows} rows)"
    findings = []
    if trial.is_constant:
        findings.append("it gives the same for all, and a group of equal rewards trains nothing; check the function")
    unpaid = [prompt_id for prompt_id in trial.unpaid if prompt_id in answered]
    if unpaid:
        row = answered[unpaid[0]]
        example = f"first {unpaid[0]}: {_shown(trial.rewards[unpaid[0]][0])} for {_cut(row.own[0])}"
        findings.append(f"{len(unpaid)} rows get 0 or None for their own answer, {example}")
    if 0 < len(trial.deceived) < len(trial.rewards):
        findings.append(f"{len(trial.deceived)} rows pay another row's answer as much, first {trial.deceived[0]}")
    pays_answers = trial.function in COMPARING and settings.rewards.answer_pattern is None
    state = "fail" if pays_answers and len(unpaid) > share * trial.rows else "note" if findings else "ok"
    return Check("rewards", state, "; ".join([detail, *findings]))


def _shown(value: float | None) -> str:
    return "None" if value is None else f"{value:g}"
