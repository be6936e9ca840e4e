"""Learned predictors of output length as a feature: trees and language models, and the process that refits them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from streamrl.schemas.extras import require_extra
from streamrl.settings.features import ChildProcess, Feature, FeatureProcesses, FeatureRole, LoopHooks, StartHooks

if TYPE_CHECKING:
    import typer

    from streamrl.observability.role_context import ProcessContext, Role
    from streamrl.producers.lengths.buckets import Buckets
    from streamrl.producers.lengths.learned.predictor import LearnedLengths
    from streamrl.producers.lengths.settings import LengthSettings
    from streamrl.schemas.settings import LoopSettings
    from streamrl.settings.tree import Settings


def build_ranker(settings: "Settings", context: "ProcessContext") -> "Role":
    """The ranker, which makes newer length models for the dispatcher's predictor.

    Raises:
        SettingsError: the predictor has no model that a ranker can make, or a package is missing.
    """
    _check_trees(settings.lengths)
    # Imported here, because the language model needs torch.
    from streamrl.producers.lengths.learned.ranker import Ranker, build_model_trainer

    model_trainer = build_model_trainer(settings.lengths, settings.loop)
    return Ranker(context.bus, settings.run.name, model_trainer, on_tick=context.on_tick)


def _open_predictor(settings: "LengthSettings", loop: "LoopSettings", buckets: "Buckets") -> "LearnedLengths":
    from streamrl.producers.lengths.learned.predictor import LearnedLengths

    if settings.fits_in_thread:
        _check_trees(settings)
    return LearnedLengths(settings, loop, buckets)


def _check_trees(settings: "LengthSettings") -> None:
    """Check that the library that fits trees is installed, if the predictor fits trees."""
    if settings.predictor == "learned":
        require_extra("learned", 'lengths.predictor = "learned"')


def _check_packages(settings: "Settings") -> None:
    if settings.lengths.refit != "off":
        _check_trees(settings.lengths)


def _processes(settings: "Settings") -> Sequence[ChildProcess]:
    return [ChildProcess("ranker", "ranker", optional=True)] if settings.lengths.refit == "process" else []


def _commands(app: "typer.Typer") -> None:
    from streamrl.producers.lengths.learned.role_commands import lengths

    app.add_typer(lengths, name="lengths")


FEATURE = Feature(
    name="learned lengths",
    processes=FeatureProcesses(
        roles=(
            FeatureRole(
                "ranker",
                help='The ranker: refits the length model during a run.\n\nNeeded for lengths.refit = "process".',
                build=build_ranker,
                leads=True,
            ),
        ),
        started=_processes,
    ),
    start=StartHooks(packages=_check_packages),
    loop=LoopHooks(predictors={"learned": _open_predictor, "language_model": _open_predictor}),
    commands=_commands,
)
