"""Evaluation during a run as a feature: its process, the rules of its settings, and the workers' side work for it."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from streamrl.schemas.errors import SettingsError
from streamrl.settings.features import (
    ChildProcess,
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
            partial(_held_out, settings), wanted, settings.rewards.weight_by_name, sampling_seed(settings)
        ),
        metrics=RunDirectory(settings.run.path).metrics,
        on_tick=context.on_tick,
        policies=policy_dispatch(),
    )


def _held_out(settings: "Settings") -> "HeldOutPrompts":
    from streamrl.producers.evaluation.state import HeldOutPrompts
    from streamrl.producers.prompts.sources import first_prompts, open_source

    wanted = _held_out_of(settings)
    seed, rewards = settings.run.seed, settings.rewards.functions
    sources = {name: open_source(data, run_seed=seed, rewards=rewards) for name, data in wanted.sets.items()}
    return HeldOutPrompts.of({name: first_prompts(source, wanted.prompts) for name, source in sources.items()})


def _processes(settings: "Settings") -> Sequence[ChildProcess]:
    if not _held_out_of(settings).sets:
        return []
    return [ChildProcess("evaluator", "evaluator", optional=True, awaited=True, is_single=True)]


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


def _check_start(settings: "Settings") -> None:
    from pathlib import Path

    from streamrl.deploy.local.task_check import require_readable
    from streamrl.producers.prompts.tables import check_path

    for name, held_out in _held_out_of(settings).sets.items():
        if held_out.path is not None:
            check_path(held_out.path)
            require_readable(Path(held_out.path).expanduser(), f"evaluation.data.{name}.path")


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
    start=StartHooks(check=_check_start),
    loop=LoopHooks(side_work=_side_work),
)
