"""Trainers that stand by as a feature: one that has everything loaded, and takes over from a silent leader."""

from dataclasses import replace
from typing import TYPE_CHECKING

from streamrl.settings.features import Feature, FeatureProcesses, FeatureRole

if TYPE_CHECKING:
    from streamrl.consumers.training.session import TrainerParts
    from streamrl.observability.role_context import ProcessContext, Role
    from streamrl.settings.tree import Settings


def build_standby(settings: "Settings", context: "ProcessContext") -> "Role":
    """One that stands by for it, on this machine or another.

    Raises:
        SettingsError: checkpoints cannot be kept where the settings say.
    """
    from streamrl.consumers.standby.settings import Takeover
    from streamrl.consumers.standby.standby_trainer import Prefetch, StandbyTrainer
    from streamrl.consumers.training.checkpoints.catalogue import next_start, read_rollback
    from streamrl.consumers.training.checkpoints.store import CheckpointStore
    from streamrl.deploy.wiring.trainer import cached_storage, led, trainer_context

    trainer, parts_of = trainer_context(settings, context)
    # A folder of its own: a trainer that takes the run over empties that of the leading one.
    place = cached_storage(settings, "cache-standby")
    prefetch = Prefetch(
        CheckpointStore(place, settings.training.keep_checkpoints),
        trainer.parts.open_policy,
        lambda: (next_start(place), read_rollback(place)),
    )

    def loaded(is_served: bool) -> "TrainerParts":
        parts = parts_of(is_served)
        # What is loaded in advance exports for workers; a policy that is not served is loaded when it leads.
        open_policy = prefetch.open_policy if is_served else parts.open_policy
        return replace(parts, checkpoints=prefetch, open_policy=open_policy)

    return StandbyTrainer(
        replace(trainer, parts=replace(trainer.parts, checkpoints=prefetch, open_policy=prefetch.open_policy)),
        prefetch,
        settings.section(Takeover).takeover_after_s,
        lead=lambda context, beat_s: led(context, beat_s, loaded).run,
    )


def _standbys(settings: "Settings") -> int:
    from streamrl.consumers.standby.settings import StandbyTrainers

    return settings.section(StandbyTrainers).standby_trainers


FEATURE = Feature(
    name="standby",
    # Its command is the trainer's, with an option.
    processes=FeatureProcesses(
        roles=(FeatureRole("standby", help="", build=build_standby, observed_as="trainer"),),
        standbys=_standbys,
        standby_arguments=("--standby",),
    ),
)
