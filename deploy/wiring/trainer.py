"""Builds the trainer: its policy (in torch, or emulated), where it computes, and where its checkpoints go.

And the standby, which is the same trainer with everything loaded in advance, and an instance beside the served one.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from streamrl.consumers.ingest.attachment import Attachment
from streamrl.consumers.training.attached import AttachedTrainer
from streamrl.consumers.training.checkpoints.catalogue import next_start
from streamrl.consumers.training.checkpoints.marks import read_rollback
from streamrl.consumers.training.checkpoints.storage import CheckpointStorage, check_storage, open_storage
from streamrl.consumers.training.checkpoints.store import CheckpointStore
from streamrl.consumers.training.checkpoints.store import VerifiedCheckpoint as RestoredTensors
from streamrl.consumers.training.identity_store import IdentityFile
from streamrl.consumers.training.ports import OpenCompute, OpenPolicy, Policy, RestoredCheckpoint
from streamrl.consumers.training.standby import Prefetch, StandbyTrainer
from streamrl.consumers.training.trainer import Trainer
from streamrl.observability.role_context import ProcessContext
from streamrl.schemas.identifiers import SERVED_POLICY
from streamrl.settings.tree import Settings

OpenPolicyOf = Callable[[bool], OpenPolicy]
"""What opens the policy, by whether it is served: its weights go to the relay's store then."""


def _trainer(settings: Settings, context: ProcessContext) -> tuple[Trainer, OpenPolicyOf]:
    check_storage(_location(settings))
    place = _storage(settings, "cache")
    checkpoints = CheckpointStore(place, settings.training.keep_checkpoints)
    if settings.training.backend == "emulated":
        open_policy_of, open_compute, open_exporter = _emulated_trainer(settings, checkpoints)
    else:
        (open_policy_of, open_compute), open_exporter = _in_torch(settings, place), None
    trainer = Trainer(
        bus=context.bus,
        run_name=settings.run.name,
        loop=settings.loop,
        algorithm=settings.algorithm,
        training=settings.training,
        ingest=settings.ingest,
        batching=settings.batching,
        reward_weights=settings.rewards.weight_by_name,
        open_policy=open_policy_of(_is_own(settings)),
        open_compute=open_compute,
        open_exporter=open_exporter,
        checkpoints=checkpoints,
        run_dir=settings.run.path,
        identity=IdentityFile(settings.run.path),
        adopt=context.adopt,
        servers=settings.kafka.bootstrap_servers,
        policy=settings.run.instance,
        attachment=None if _is_own(settings) else Attachment(settings.ingest.attach_from),
    )
    return trainer, open_policy_of


def _is_own(settings: Settings) -> bool:
    return settings.run.instance == SERVED_POLICY


def _weights_store(settings: Settings, is_served: bool) -> Path:
    return settings.run.weights_store if is_served else settings.run.own_weights_store


def build_leading(settings: Settings, context: ProcessContext) -> AttachedTrainer:
    """The run's own trainer, or an instance's, with its sign of life, following what the run says to it. It goes on
    from the newest checkpoint if its directory holds the run.

    Raises:
        SettingsError: checkpoints cannot be kept where the settings say.
    """
    trainer, open_policy_of = _trainer(settings, context)
    return AttachedTrainer(trainer, open_policy_of=open_policy_of, weights_of=partial(_weights_store, settings))


def build_standby(settings: Settings, context: ProcessContext) -> StandbyTrainer:
    """One that stands by for it, on this machine or another."""
    trainer, open_policy_of = _trainer(settings, context)
    # A folder of its own: whoever takes the run over empties that of the trainer.
    place = _storage(settings, "cache-standby")
    prefetch = Prefetch(
        CheckpointStore(place, settings.training.keep_checkpoints),
        trainer.open_policy,
        lambda: (next_start(place), read_rollback(place)),
    )
    trainer = replace(trainer, checkpoints=prefetch, open_policy=prefetch.open_policy)

    def open_as(is_served: bool) -> OpenPolicy:
        # What is loaded in advance exports for workers; a policy that is not served is loaded when it leads.
        return prefetch.open_policy if is_served else open_policy_of(is_served)

    followed = partial(AttachedTrainer, open_policy_of=open_as, weights_of=partial(_weights_store, settings))
    return StandbyTrainer(
        trainer,
        prefetch,
        settings.training.takeover_after_s,
        lead=lambda standby, beat_s: followed(standby, beat_s).run,
    )


def _location(settings: Settings) -> str | Path:
    return settings.training.checkpoint_location or settings.run.path / "checkpoints"


def _storage(settings: Settings, cache: str) -> CheckpointStorage:
    return open_storage(_location(settings), settings.run.path / cache)


def _in_torch(settings: Settings, place: CheckpointStorage) -> tuple[OpenPolicyOf, OpenCompute]:
    from streamrl.consumers.training.policy import ComputeThread, PolicyPaths, TrainedPolicy

    policy_class, threads = TrainedPolicy, settings.training.threads
    if settings.training.ranks > 1:
        from streamrl.consumers.training.ranks.member import threads_of
        from streamrl.consumers.training.ranks.policy import RankedPolicy

        policy_class, threads = RankedPolicy, threads_of(settings.training)

    def open_policy(is_served: bool, restored: RestoredCheckpoint | None) -> Policy:
        assert restored is None or isinstance(restored, RestoredTensors), "restored from the same place"
        return policy_class(
            PolicyPaths(settings.model.path, place, _weights_store(settings, is_served)),
            settings.algorithm,
            settings.training,
            settings.loop.max_completion_length,
            restored,
            settings.run.seed,
        )

    return partial(partial, open_policy), lambda: ComputeThread(threads)


def _emulated_trainer(
    settings: Settings, checkpoints: CheckpointStore
) -> tuple[OpenPolicyOf, OpenCompute, OpenCompute]:
    from streamrl.consumers.training.emulation import EmulatedCompute, EmulatedDevice, EmulatedPolicy
    from streamrl.weights.export import WeightExporter

    device, exporting = (EmulatedDevice(settings.emulation.time_scale) for _ in range(2))
    training = settings.training

    def open_policy(is_served: bool, restored: RestoredCheckpoint | None) -> Policy:
        store = _weights_store(settings, is_served)
        weights = WeightExporter(store, training.keep_weight_versions, training.weight_transfer)
        made_of = settings.emulation.training, device, exporting, weights, checkpoints, restored
        return EmulatedPolicy(*made_of, ranks=settings.training.ranks)

    opener = partial(partial, open_policy)
    return opener, lambda: EmulatedCompute(device), lambda: EmulatedCompute(exporting)
