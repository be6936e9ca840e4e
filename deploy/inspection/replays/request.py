"""What somebody asks of a replay, and the settings that follow from it. Reads no topic."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from consumers.replay.rebuilding.scratch_policy import Recipe
from consumers.replay.variation import Variation
from deploy.inspection.source import PastRun
from deploy.settings.layers import from_arguments, merged
from deploy.settings.loading import validated
from deploy.settings.tree import Settings
from schemas.errors import SettingsError, UserError

CHANGEABLE = ("algorithm", "training", "batching")


@dataclass(frozen=True)
class Request:
    """The command line. ``first`` None: no step is named."""

    run: Path
    first: int | None = None
    last: int | None = None
    lineage: int | None = None
    attempt: int | None = None
    changes: tuple[str, ...] = ()
    algorithm: str | None = None
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    bisect: bool = False
    above: float | None = None
    row_gradients: bool = False
    from_dlq: bool = False
    export: Path | None = None
    keep: Path | None = None
    threads: int | None = None
    json: bool = False

    @property
    def needs_a_step(self) -> bool:
        """Whether something is asked for that only a step can answer."""
        asked = (self.changes, self.algorithm, self.only, self.without, self.bisect, self.attempt, self.keep)
        return any(asked) or self.row_gradients or self.above is not None

    @property
    def single(self) -> bool:
        """Whether one step is looked at in full."""
        return self.first == self.last


def step_range(step: int | None, steps: str | None) -> tuple[int | None, int | None]:
    """First and last step of ``--step N`` or ``--steps FIRST:LAST``.

    Raises:
        UserError: both are given, or the range is none.
    """
    if steps is None:
        return step, step
    first, colon, last = steps.partition(":")
    if step is not None or not colon or not first.isdecimal() or not last.isdecimal() or int(first) > int(last):
        given = f"{steps!r}" + (f" and --step {step}" if step is not None else "")
        raise UserError(f"expected --step N or --steps FIRST:LAST (both included), got {given}")
    return int(first), int(last)


def recipe_of(run: PastRun, threads: int | None) -> Recipe:
    """How the run's own trainer computes."""
    settings = run.settings
    wanted = settings.training.threads if threads is None else threads
    if not wanted and (run.directory.logs / "trainer.log").exists():
        wanted = 1  # `streamrl run` gives each of its processes one thread where the settings leave it open
    return Recipe(
        settings.algorithm,
        settings.training.model_copy(update={"threads": wanted}),
        settings.loop.max_completion_length,
        settings.model.path,
        settings.run.seed,
    )


def variation_of(request: Request, settings: Settings, recipe: Recipe) -> Variation | None:
    """The what-if that is asked for, if any.

    Raises:
        SettingsError: a change names no setting of algorithm, training or batching, or a wrong value.
    """
    changed = _changed(settings, request.changes, request.algorithm)
    algorithm = (f"algorithm.name={request.algorithm}",) if request.algorithm else ()
    words = (
        *request.changes,
        *algorithm,
        *(f"only {name}" for name in request.only),
        *(f"without {name}" for name in request.without),
    )
    if not words:
        return None
    training = changed.training
    if training.threads == settings.training.threads:
        training = training.model_copy(update={"threads": recipe.training.threads})
    return Variation(
        recipe=replace(recipe, algorithm=changed.algorithm, training=training),
        changes=words,
        batching=changed.batching if changed.batching != settings.batching else None,
        only=frozenset(request.only),
        without=frozenset(request.without),
    )


def _changed(settings: Settings, changes: Sequence[str], algorithm: str | None) -> Settings:
    for change in changes:
        if "=" not in change or change.partition(".")[0] not in CHANGEABLE:
            raise SettingsError(f"expected --set SECTION.KEY=VALUE of {', '.join(CHANGEABLE)}, got {change!r}")
    tree = from_arguments(f"--{change}" for change in changes)
    if algorithm is not None:
        tree = merged(tree, {"algorithm": {"name": algorithm}})
    return validated(merged(settings.model_dump(), tree))
