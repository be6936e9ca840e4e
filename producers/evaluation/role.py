"""Evaluation during a run as a feature: its process, the rules of its settings, and the workers' side work for it."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from streamrl.schemas.errors import DataError, SettingsError
from streamrl.settings.features import (
    ChildProcess,
    Displays,
    Feature,
    FeatureProcesses,
    FeatureRole,
    LoopHooks,
    SettingsRules,
    StartHooks,
    features,
    policy_dispatch,
)

if TYPE_CHECKING:
    from streamrl.coordinator.coordinator import LastEvaluation
    from streamrl.observability.role_context import ProcessContext, Role
    from streamrl.producers.evaluation.settings import HeldOutSettings
    from streamrl.producers.evaluation.state import HeldOutPrompts
    from streamrl.producers.evaluation.worker_samples import EvaluationSlots
    from streamrl.producers.prompts.settings import DataSettings
    from streamrl.schemas.evaluation import HeldOut
    from streamrl.schemas.starts import RunInput
    from streamrl.schemas.trajectories import Prompt
    from streamrl.settings.tree import Settings


def _held_out_of(settings: "Settings") -> "HeldOutSettings":
    """The ``[evaluation]`` section."""
    from streamrl.producers.evaluation.settings import HeldOutSettings

    return settings.section(HeldOutSettings)


def build_evaluator(settings: "Settings", context: "ProcessContext") -> "Role":
    """Build the evaluator for the held-out sets that the settings name.

    Raises:
        SettingsError: the settings name no set.
    """
    from streamrl.producers.evaluation.evaluator import Evaluator, HeldOutTask
    from streamrl.settings.run_directory import RunDirectory
    from streamrl.settings.tree import sampling_seed

    wanted = _held_out_of(settings)
    if not wanted.sets:
        raise SettingsError(
            "expected held-out prompts, got none: add a set, such as [evaluation.data.held_out], with evaluation.every "
            "above 0"
        )
    return Evaluator(
        bus=context.bus,
        run_name=settings.run.name,
        loop=settings.loop,
        dispatch=settings.dispatch,
        task=HeldOutTask(
            partial(_held_out, settings),
            wanted,
            settings.rewards.weight_by_name,
            sampling_seed(settings),
            settings.ingest.max_unrewarded_share,
        ),
        metrics=RunDirectory(settings.run.path).metrics,
        on_tick=context.on_tick,
        policies=policy_dispatch(),
    )


def _held_out(settings: "Settings") -> "HeldOutPrompts":
    from streamrl.producers.evaluation.state import HeldOutPrompts

    return HeldOutPrompts.of(_prompts_by_set(settings))


def _prompts_by_set(settings: "Settings") -> "dict[str, list[Prompt]]":
    """The prompts of each held-out set that are evaluated, by the set's name."""
    from streamrl.producers.prompts.sources import first_prompts, open_source

    wanted = _held_out_of(settings)
    seed, rewards = settings.run.seed, settings.rewards.functions
    sources = {name: open_source(data, run_seed=seed, rewards=rewards) for name, data in wanted.sets.items()}
    return {name: first_prompts(source, wanted.prompts) for name, source in sources.items()}


def _processes(settings: "Settings") -> Sequence[ChildProcess]:
    if not _held_out_of(settings).sets:
        return []
    # Not optional: a run whose held-out rewards fail would end with figures that mean nothing.
    return [ChildProcess("evaluator", "evaluator", awaited=True, is_single=True)]


def _completed(tree: "dict[str, Any]") -> "dict[str, Any]":
    from streamrl.producers.evaluation.settings import with_format_of_data

    return with_format_of_data(tree)


def _check_settings(settings: "Settings") -> None:
    wanted = _held_out_of(settings)
    truncates = settings.loop.sampling_params().truncates and settings.generation.engine == "vllm"
    if truncates and wanted.temperature not in (None, 0.0, settings.loop.temperature):
        raise SettingsError(
            f"expected evaluation.temperature of 0 or loop.temperature ({settings.loop.temperature}) with vLLM and "
            f"top_p, top_k or min_p, got {wanted.temperature}; leave evaluation.temperature out"
        )
    if wanted.sets and any(feature.loop.takes_samples(settings) for feature in features()):
        raise SettingsError(
            "expected [evaluation.data] or rewards.graded, got both: only workers score held-out completions, so the "
            "graders' rewards would be missing; leave one of the two out"
        )
    if wanted.sets:
        _check_passing(settings, wanted.passes_at)
    for name, held_out in wanted.sets.items():
        if held_out.chat_template_kwargs != settings.data.chat_template_kwargs:
            raise SettingsError(
                f"expected the chat_template_kwargs of [data] in [evaluation.data.{name}], since workers render all "
                f"prompts alike, got {held_out.chat_template_kwargs}; leave them out of the set"
            )


def _check_passing(settings: "Settings", passes_at: float | str | None) -> None:
    weights = settings.rewards.weight_by_name
    forms = [name for name, of in zip(weights, settings.rewards.functions, strict=True) if of == "format"]
    if isinstance(passes_at, str):
        if passes_at not in weights:
            raise SettingsError(
                f"expected a number or the name of a reward ({', '.join(weights)}) as evaluation.passes_at, got "
                f"{passes_at!r}"
            )
    elif passes_at is None:
        if max(weights.values()) <= 0:
            raise SettingsError(
                "expected one of rewards.weights above 0, or evaluation.passes_at, got neither: it says what makes a "
                "held-out completion pass"
            )
    elif len(forms) < len(weights) and (form := sum(max(0.0, weights[name]) for name in forms)) >= passes_at:
        raise SettingsError(
            f"expected evaluation.passes_at above {form:g}, since a completion of the right format alone would pass, "
            f"got {passes_at:g}; leave it out, or give the name of the reward that decides"
        )


def _check_start(settings: "Settings") -> None:
    from pathlib import Path

    from streamrl.deploy.local.task_check import require_readable
    from streamrl.producers.prompts.tables import check_path

    for name, held_out in _held_out_of(settings).sets.items():
        if held_out.path is not None:
            check_path(held_out.path)
            require_readable(Path(held_out.path).expanduser(), f"evaluation.data.{name}.path")


def _notes(settings: "Settings") -> list[str]:
    wanted, last = _held_out_of(settings), settings.training.max_steps
    notes = [
        f"the run trains on prompts of the held-out set {name}; give it another split or file, or a seed that is at "
        "least 10,000 away"
        for name, held_out in wanted.sets.items()
        if _is_trained(settings, held_out, wanted.prompts)
    ]
    with suppress(DataError):  # data that cannot be read is refused with the run's prompts, or with the set
        notes += _on_shared_prompts(settings)
    if wanted.sets and wanted.every > last:
        notes.append(
            f"only the initial weights will be evaluated, since evaluation.every = {wanted.every} is above "
            f"training.max_steps = {last}"
        )
    return notes


def _on_shared_prompts(settings: "Settings") -> list[str]:
    """Notes on held-out sets with prompts that are in the training data, too, under another name."""
    from streamrl.producers.prompts.sources import shared_with

    wanted = _held_out_of(settings)
    notes: list[str] = []
    if settings.data.path is None or settings.generation.engine == "emulated":
        return []
    for name, prompts in _prompts_by_set(settings).items():
        if _is_trained(settings, wanted.sets[name], wanted.prompts):
            continue
        if shared := shared_with(settings.data, prompts):
            count = f"{len(shared)} of {len(prompts)} prompts of the held-out set {name} are trained, too"
            notes.append(f"{count}, such as {shared[0]}; take them out of one of the two")
    return notes


def _is_trained(settings: "Settings", held_out: "DataSettings", prompts: int) -> bool:
    """Whether the settings alone say that the run trains on prompts of a held-out set."""
    data = settings.data
    if held_out.path is not None:
        is_part = held_out.split == data.split or held_out.split.startswith(f"{data.split}[")
        return is_part and (held_out.path, held_out.subset, held_out.filter) == (data.path, data.subset, data.filter)
    # A generated prompt is a function of the seed plus its index.
    seed, own = (settings.run.seed if each.seed is None else each.seed for each in (data, held_out))
    trained = settings.training.max_steps * settings.loop.groups_per_step
    are_alike = any(data.parts.get(name) == part for name, part in held_out.parts.items())
    return are_alike and not data.requests_only and data.path is None and seed - prompts < own < seed + trained


async def _try_out(settings: "Settings") -> str | None:
    from streamrl.deploy.local.task_check import try_prompts
    from streamrl.producers.evaluation.results import PassRule

    wanted = _held_out_of(settings)
    if not wanted.sets or settings.generation.engine == "emulated":
        return None
    lines = [await try_prompts(settings, *of_set) for of_set in _prompts_by_set(settings).items()]
    rule = PassRule.of(wanted.passes_at, settings.rewards.weight_by_name)
    return f"{'; '.join(lines)}; a completion passes if {rule}"


def _inputs(settings: "Settings") -> "list[RunInput]":
    """The data of held-out sets. They change measurements, not training."""
    from streamrl.producers.prompts.fingerprints import prompts_fingerprint
    from streamrl.schemas.starts import RunInput

    sets = _held_out_of(settings).sets.items()
    return [
        RunInput(f"held-out set {name}", prompts_fingerprint(data), shapes_trajectories=False) for name, data in sets
    ]


def _side_work(settings: "Settings") -> "EvaluationSlots | None":
    from streamrl.producers.evaluation.worker_samples import EvaluationSlots

    slots = _held_out_of(settings).slots(settings.generation.max_num_seqs)
    return EvaluationSlots(slots) if slots else None


def _awaited(settings: "Settings") -> "LastEvaluation | None":
    from streamrl.coordinator.coordinator import LastEvaluation
    from streamrl.producers.evaluation.settings import PATIENCE_S

    wanted = _held_out_of(settings)
    if not wanted.sets:
        return None
    due = partial(wanted.newest_due, exported_every=settings.training.weight_sync_steps)
    return LastEvaluation(due, PATIENCE_S)


def _held_out_result(
    evaluations: Sequence[tuple[int, Mapping[str, float]]], settings: Mapping[str, Any]
) -> "HeldOut | None":
    """pass@1 over all sets, at the first and the last weights that were evaluated."""
    from streamrl.observability.run_state.evaluations import OVERALL
    from streamrl.schemas.evaluation import PROMPTS, HeldOut

    known = [(step, metrics) for step, metrics in evaluations if OVERALL in metrics]
    if not known:
        return None
    (first, before), (last, after) = known[0], known[-1]
    # Two versions may have been evaluated with different numbers of prompts, if settings changed in between.
    prompts = int(min(before.get(PROMPTS, 0), after.get(PROMPTS, 0)))
    conditions = _conditions(settings)
    return HeldOut("pass@1", before[OVERALL], after[OVERALL], (first, last), prompts, conditions)


def _conditions(settings: Mapping[str, Any]) -> str:
    """How held-out prompts were sampled, in words; ``settings``: by dotted key."""
    sets = sorted({key.split(".")[2] for key in settings if key.startswith("evaluation.data.")})
    samples = settings.get("evaluation.samples", 1)
    temperature = settings.get("evaluation.temperature", settings.get("loop.temperature"))
    of = f"of {', '.join(sets)}, " if sets else "with "
    sampled = f"{samples} {'sample' if samples == 1 else 'samples'} of each"
    return f"{of}{sampled}{'' if temperature is None else f', temperature {temperature:g}'}"


FEATURE = Feature(
    name="evaluation",
    settings=SettingsRules(check=_check_settings, complete=_completed),
    processes=FeatureProcesses(
        roles=(
            FeatureRole(
                "evaluator",
                help="The evaluator: pass@k of held-out prompts.\n\nNeeded for [evaluation.data].",
                build=build_evaluator,
                leads=True,
            ),
        ),
        started=_processes,
        awaited=_awaited,
    ),
    start=StartHooks(check=_check_start, notes=_notes, try_out=_try_out, inputs=_inputs),
    loop=LoopHooks(side_work=_side_work),
    displays=Displays(held_out=_held_out_result),
)
