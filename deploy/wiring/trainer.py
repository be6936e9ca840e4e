"""Builds the trainer: its policy (in torch, or emulated), where it computes, and where its checkpoints go.

And the standby, which is the same trainer with everything loaded in advance.
"""

from dataclasses import replace
from pathlib import Path

from consumers.training.checkpoints.catalogue import next_start
from consumers.training.checkpoints.marks import read_rollback
from consumers.training.checkpoints.storage import CheckpointStorage, check_storage, open_storage
from consumers.training.checkpoints.store import CheckpointStore
from consumers.training.checkpoints.store import VerifiedCheckpoint as RestoredTensors
from consumers.training.identity_store import IdentityFile
from consumers.training.ports import OpenCompute, OpenPolicy, Policy, RestoredCheckpoint
from consumers.training.standby import LeadingTrainer, Prefetch, StandbyTrainer
from consumers.training.trainer import Trainer
from deploy.wiring.context import ProcessContext
from settings.tree import Settings


def build_trainer(settings: Settings, context: ProcessContext) -> Trainer:
    """The trainer of the run's directory; it goes on from the newest checkpoint if that directory holds the run.

    Raises:
        SettingsError: checkpoints cannot be kept where the settings say.
    """
    check_storage(_location(settings))
    place = _storage(settings, "cache")
    checkpoints = CheckpointStore(place, settings.training.keep_checkpoints)
    if settings.training.backend == "emulated":
        open_policy, open_compute, open_exporter = _emulated_trainer(settings, checkpoints)
    else:
        (open_policy, open_compute), open_exporter = _in_torch(settings, place), None
    return Trainer(
        bus=context.bus,
        run_name=settings.run.name,
        loop=settings.loop,
        algorithm=settings.algorithm,
        training=settings.training,
        ingest=settings.ingest,
        batching=settings.batching,
        reward_weights=settings.rewards.weight_by_name,
        open_policy=open_policy,
        open_compute=open_compute,
        open_exporter=open_exporter,
        checkpoints=checkpoints,
        run_dir=settings.run.path,
        identity=IdentityFile(settings.run.path),
        adopt=context.adopt,
        servers=settings.kafka.bootstrap_servers,
    )


def build_leading(settings: Settings, context: ProcessContext) -> LeadingTrainer:
    """The trainer, with its sign of life."""
    return LeadingTrainer(build_trainer(settings, context))


def build_standby(settings: Settings, context: ProcessContext) -> StandbyTrainer:
    """One that stands by for it, on this machine or another."""
    trainer = build_trainer(settings, context)
    # A folder of its own: whoever takes the run over empties that of the trainer.
    place = _storage(settings, "cache-standby")
    prefetch = Prefetch(
        CheckpointStore(place, settings.training.keep_checkpoints),
        trainer.open_policy,
        lambda: (next_start(place), read_rollback(place)),
    )
    trainer = replace(trainer, checkpoints=prefetch, open_policy=prefetch.open_policy)
    return StandbyTrainer(trainer, prefetch, settings.training.takeover_after_s)


def _location(settings: Settings) -> str | Path:
    return settings.training.checkpoint_location or settings.run.path / "checkpoints"


def _storage(settings: Settings, cache: str) -> CheckpointStorage:
    return open_storage(_location(settings), settings.run.path / cache)


def _in_torch(settings: Settings, place: CheckpointStorage) -> tuple[OpenPolicy, OpenCompute]:
    from consumers.training.policy import ComputeThread, PolicyPaths, TrainedPolicy

    def open_policy(restored: RestoredCheckpoint | None) -> Policy:
        assert restored is None or isinstance(restored, RestoredTensors), "restored from the same place"
        return TrainedPolicy(
            PolicyPaths(settings.model.path, place, settings.run.weights_store),
            settings.algorithm,
            settings.training,
            settings.loop.max_completion_length,
            restored,
            settings.run.seed,
        )

    return open_policy, lambda: ComputeThread(settings.training.threads)


def _emulated_trainer(settings: Settings, checkpoints: CheckpointStore) -> tuple[OpenPolicy, OpenCompute, OpenCompute]:
    from consumers.training.emulation import EmulatedCompute, EmulatedDevice, EmulatedPolicy
    from consumers.training.weight_export import WeightStore

    device, exporting = (EmulatedDevice(settings.emulation.time_scale) for _ in range(2))
    weights = WeightStore(
        settings.run.weights_store, settings.training.keep_weight_versions, settings.training.weight_transfer
    )

    def open_policy(restored: RestoredCheckpoint | None) -> Policy:
        return EmulatedPolicy(settings.emulation.training, device, exporting, weights, checkpoints, restored)

    return open_policy, lambda: EmulatedCompute(device), lambda: EmulatedCompute(exporting)
