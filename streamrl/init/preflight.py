"""`streamrl run --dry-run`: a checklist of problems that can be found before a run starts.

Each check uses the code of the run itself (data source, tokenizer, reward runner, engine factory, topics) and leaves
nothing behind: it creates no topic, loads no weights, and removes its trial files. A check that raises becomes a failed
line, and the others continue.
"""

import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from streamrl.bus.embedded import detached
from streamrl.bus.embedded.jars import KAFKA_VERSION, MEGABYTE, missing_jars
from streamrl.bus.embedded.runtime import cache_root, find_java
from streamrl.bus.kafka.topic_admin import diff_topics
from streamrl.consumers.training.checkpoints.storage import REMOTE, open_storage
from streamrl.consumers.training.model import require_weights, resolve_device, weight_faults
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.deploy.local.task_check import (
    REWARD_ROWS,
    SampledPrompts,
    disk_room,
    longest_prompt,
    never_ends,
    parameters_of,
    refuses_too_many,
    require_engine,
    require_extras,
    require_writable,
    survey_of,
)
from streamrl.init.checklist import Check, Checklist, Report, closing_line
from streamrl.init.precision import slow_bfloat16
from streamrl.init.reward_checks import MAX_SHOWN_CHARACTERS, check_opening, check_rewards, cut, rendered_by
from streamrl.inspection.environment import fitted_here
from streamrl.observability.metrics.tracking import try_trackers
from streamrl.producers.generation.engines.model_files import UNLIMITED, ModelFacts, read_facts
from streamrl.producers.generation.tokenizer import ModelTokenizer
from streamrl.schemas.errors import CheckpointError, UserError
from streamrl.schemas.import_path import load_function
from streamrl.schemas.trajectories import Prompt
from streamrl.settings.features import Feature, features
from streamrl.settings.placement import place
from streamrl.settings.run_directory import named
from streamrl.settings.tree import Settings

PROMPTS_PATIENCE_S = 60.0
"""Most seconds in which prompts are read and tokenised: all of most data sets, and a sample of larger ones."""
MEDIA = {"image", "images", "video", "videos", "audio", "audios"}
"""Columns that other libraries show to the model."""


def dry_run(settings: Settings, report: Report) -> int:
    """Check everything and report it; returns 0, or 2 if a check failed."""
    settings = named(settings)
    checklist = Checklist(report)
    checklist.add(Check("settings", "ok", f"run {settings.run.name}, in {settings.run.path}/"))
    if (fitted := checklist.attempt("placement", lambda: fitted_here(settings))) is not None:
        settings = fitted[0]
        checklist.run("placement", lambda: Check("placement", "ok", "; ".join(place(*fitted).lines())))
    emulated = settings.generation.engine == "emulated"
    if settings.data.requests_only:
        checklist.add(Check("data", "ok", "no prompts: trajectories come from gateway requests and environments"))
    prompts = None if settings.data.requests_only else checklist.attempt("data", lambda: SampledPrompts(settings))
    first = checklist.attempt("data", lambda: [*prompts.first(REWARD_ROWS, PROMPTS_PATIENCE_S)]) if prompts else None
    if first and prompts is not None:
        checklist.run("data", lambda: check_prompts(first, prompts.total, prompts.notes))
        checklist.run("data", lambda: check_amount(settings, prompts.total))
    # An emulated run has neither a model nor real rewards, so these are not checked.
    tokenizer = None if emulated else checklist.attempt("tokenizer", lambda: read_tokenizer(settings))
    size = 0 if emulated else _model(checklist, settings, tokenizer, prompts if first else None)
    if first and tokenizer is not None:
        checklist.run("tokenizer", lambda: check_rendering(tokenizer, first))
        checklist.run("tokenizer", lambda: check_next_turn(tokenizer, first))
        checklist.run("rewards", lambda: check_opening(settings, tokenizer, first))
    if first and not emulated:
        checklist.run("rewards", lambda: check_rewards(settings, first, tokenizer, checklist.show))
    _surroundings(checklist, settings, size)
    report(closing_line(checklist.checks))
    return 2 if any(check.state == "fail" for check in checklist.checks) else 0


def _model(
    checklist: Checklist, settings: Settings, tokenizer: ModelTokenizer | None, prompts: SampledPrompts | None
) -> int:
    """The model's number of parameters; 0 if the model cannot be read."""
    facts = checklist.attempt("model", lambda: read_model(settings))
    if facts is not None:
        checklist.run("model", lambda: check_model(facts, settings.model.path))
        checklist.run("model", lambda: check_weights(settings))
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


def check_weights(settings: Settings) -> list[Check]:
    """A failure for each kind of weights that cannot be trained, and a note on a learning rate that never warms up."""
    checks = [Check("model", "fail", f"{settings.model.path}: {fault}") for fault in weight_faults(settings.model.path)]
    warm_up, last = settings.training.warmup_steps, settings.training.max_steps
    if warm_up >= last:
        detail = f"training.warmup_steps = {warm_up} is not below training.max_steps = {last}"
        checks.append(Check("training", "note", f"{detail}: the learning rate never reaches its value"))
    return checks


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
    return [Check("tokenizer", "note", f"{detail}, first {name}: {cut(text)} becomes {cut(rendered)}")]


def check_next_turn(tokenizer: ModelTokenizer, prompts: Sequence[Prompt]) -> list[Check]:
    """A note if the chat template does not open the assistant's turn, so that the model may continue the user's."""
    chats = [(prompt, prompt.content) for prompt in prompts if not isinstance(prompt.content, str)]
    if not chats or chats[0][1][-1].role == "assistant" or tokenizer.opens_turn(chats[0][0]):
        return []
    detail = "the chat template adds nothing for the assistant's turn (add_generation_prompt)"
    return [Check("tokenizer", "note", f"{detail}: the model continues the last turn, or opens its own")]


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


def check_prompts(prompts: Sequence[Prompt], total: int, known: Sequence[str] = ()) -> Check:
    """A line with the number of prompts, what is ``known`` of the data, the first prompt, and the rewards' columns."""
    first = prompts[0]
    text = first.text if len(first.text) <= MAX_SHOWN_CHARACTERS else first.text[:MAX_SHOWN_CHARACTERS] + "…"
    columns = ", ".join(sorted(first.columns)) or "none"
    shown = f"{first.prompt_id} is {text!r}; columns for rewards: {columns}"
    unseen = sorted({name for prompt in prompts for name in MEDIA & prompt.columns.keys() if prompt.columns[name]})
    notes = [*known]
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
