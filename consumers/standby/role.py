"""The feature of standby trainers: each has everything loaded, and takes over from a silent leader."""

from dataclasses import replace
from typing import TYPE_CHECKING

from streamrl.settings.features import Feature, FeatureProcesses, FeatureRole

if TYPE_CHECKING:
    from streamrl.consumers.training.session import TrainerParts
    from streamrl.observability.role_context import ProcessContext, Role
    from streamrl.settings.tree import Settings


def build_standby(settings: "Settings", context: "ProcessContext") -> "Role":
    """A standby trainer, for a leader on this machine or another.

    Raises:
        SettingsError: checkpoints cannot be kept where the settings say.
    """
    from streamrl.consumers.standby.standby_trainer import Prefetch, StandbyTrainer
    from streamrl.consumers.training.checkpoints.catalogue import next_start, read_rollback
    from streamrl.consumers.training.checkpoints.store import CheckpointStore
    from streamrl.deploy.wiring.trainer import cached_storage, led, trainer_context

    trainer, parts_of = trainer_context(settings, context)
    # A separate cache folder: a trainer that takes the run over empties the leader's.
    place = cached_storage(settings, "cache-standby")
    prefetch = Prefetch(
        CheckpointStore(place, settings.training.keep_checkpoints),
        trainer.parts.open_policy,
        lambda: (next_start(place), read_rollback(place)),
    )

    def loaded(is_served: bool) -> "TrainerParts":
        parts = parts_of(is_served)
        # The prefetched policy exports weights for workers. A policy that is not served is loaded when it leads.
        open_policy = prefetch.open_policy if is_served else parts.open_policy
        return replace(parts, checkpoints=prefetch, open_policy=open_policy)

    return StandbyTrainer(
        replace(trainer, parts=replace(trainer.parts, checkpoints=prefetch, open_policy=prefetch.open_policy)),
        prefetch,
        lead=lambda context, beat_s: led(context, beat_s, loaded).run,
    )


def _standbys(settings: "Settings") -> int:
    from streamrl.consumers.standby.settings import StandbyTrainers

    return settings.section(StandbyTrainers).standby_trainers


FEATURE = Feature(
    name="standby",
    # It has no command of its own: `streamrl trainer` with an option starts it.
    processes=FeatureProcesses(
        roles=(FeatureRole("standby", help="", build=build_standby, observed_as="trainer"),),
        standbys=_standbys,
        standby_arguments=("--standby",),
    ),
)
