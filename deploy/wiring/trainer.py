"""Builds a trainer, the run's own or an instance's: its policy (torch or emulated), compute thread and checkpoints."""

from functools import partial
from pathlib import Path

from streamrl.consumers.training.checkpoints.storage import CheckpointStorage, check_storage, open_storage
from streamrl.consumers.training.checkpoints.store import CheckpointStore
from streamrl.consumers.training.checkpoints.store import VerifiedCheckpoint as RestoredTensors
from streamrl.consumers.training.identity_store import IdentityFile
from streamrl.consumers.training.leading import BEAT_S, LeadingTrainer
from streamrl.consumers.training.ports import Policy, RestoredCheckpoint
from streamrl.consumers.training.session import LearningSettings, PartsOf, TrainedRun, TrainerContext, TrainerParts
from streamrl.consumers.training.trainer import Trainer
from streamrl.observability.role_context import ProcessContext, Role
from streamrl.observability.usage import own_usage
from streamrl.schemas.identifiers import SERVED_POLICY
from streamrl.settings.features import policy_hooks
from streamrl.settings.tree import Settings


def build_leading(settings: Settings, context: ProcessContext) -> Role:
    """The run's own trainer or an instance's, with its heartbeats.

    It continues from the newest checkpoint if its directory holds the run.

    Raises:
        SettingsError: the configured storage of checkpoints cannot be used.
    """
    trainer, parts_of = trainer_context(settings, context)
    return led(trainer, BEAT_S, parts_of)


def led(context: TrainerContext, beat_s: float, parts_of: PartsOf) -> Role:
    """A trainer with its heartbeats; if several policies may share the stream, it follows which one is served."""
    hooks = policy_hooks()
    return LeadingTrainer(Trainer(context), beat_s) if hooks is None else hooks.lead_trainer(context, beat_s, parts_of)


def trainer_context(settings: Settings, context: ProcessContext) -> tuple[TrainerContext, PartsOf]:
    """The trainer's context, and a function that returns its parts, given whether its policy is served.

    Raises:
        SettingsError: the configured storage of checkpoints cannot be used.
    """
    check_storage(settings.checkpoint_location)
    checkpoints = CheckpointStore(cached_storage(settings, "cache"), settings.training.keep_checkpoints)
    parts_of = (_emulated if settings.training.backend == "emulated" else _in_torch)(settings, checkpoints)
    learning = LearningSettings(
        loop=settings.loop,
        algorithm=settings.algorithm,
        training=settings.training,
        ingest=settings.ingest,
        batching=settings.batching,
        reward_weights=settings.rewards.weight_by_name,
    )
    run = TrainedRun(
        bus=context.bus,
        name=settings.run.name,
        policy=settings.run.instance,
        servers=settings.kafka.bootstrap_servers,
        directory=settings.run.path,
        identity=IdentityFile(settings.run.path),
        adopt=context.adopt,
    )
    parts = parts_of(settings.run.instance == SERVED_POLICY)
    return TrainerContext(learning, run, parts, usage=own_usage().usage), parts_of


def _weights_store(settings: Settings, is_served: bool) -> Path:
    return settings.run.weights_store if is_served else settings.run.own_weights_store


def cached_storage(settings: Settings, cache: str) -> CheckpointStorage:
    """The storage of checkpoints; downloads go to the folder ``cache`` in the run's directory."""
    return open_storage(settings.checkpoint_location, settings.run.path / cache)


def _in_torch(settings: Settings, checkpoints: CheckpointStore) -> PartsOf:
    from streamrl.consumers.training.policy import ComputeThread, PolicyPaths, TrainedPolicy
    from streamrl.deploy.wiring.model_card import model_card

    policy_class, threads = TrainedPolicy, settings.training.threads
    if settings.training.ranks > 1:
        from streamrl.consumers.training.ranks.member import threads_of
        from streamrl.consumers.training.ranks.policy import RankedPolicy

        policy_class, threads = RankedPolicy, threads_of(settings.training)

    def open_policy(weights: Path, restored: RestoredCheckpoint | None) -> Policy:
        assert restored is None or isinstance(restored, RestoredTensors), "restored from the same place"
        return policy_class(
            PolicyPaths(settings.model.path, checkpoints.storage, weights, partial(model_card, settings)),
            settings.algorithm,
            settings.training,
            settings.loop.max_completion_length,
            restored,
            settings.run.seed,
        )

    def parts_of(is_served: bool) -> TrainerParts:
        weights = _weights_store(settings, is_served)
        return TrainerParts(partial(open_policy, weights), lambda: ComputeThread(threads), checkpoints, weights=weights)

    return parts_of


def _emulated(settings: Settings, checkpoints: CheckpointStore) -> PartsOf:
    from streamrl.consumers.training.emulation import EmulatedCompute, EmulatedDevice, EmulatedPolicy
    from streamrl.weights.export import WeightExporter

    device, exporting = (EmulatedDevice(settings.emulation.time_scale) for _ in range(2))
    training = settings.training

    def open_policy(weights: Path, restored: RestoredCheckpoint | None) -> Policy:
        exporter = WeightExporter(weights, training.keep_weight_versions, training.weight_transfer)
        made_of = settings.emulation.training, device, exporting, exporter, checkpoints, restored
        return EmulatedPolicy(*made_of, ranks=settings.training.ranks)

    def parts_of(is_served: bool) -> TrainerParts:
        weights = _weights_store(settings, is_served)
        return TrainerParts(
            partial(open_policy, weights),
            lambda: EmulatedCompute(device),
            checkpoints,
            lambda: EmulatedCompute(exporting),
            weights,
        )

    return parts_of
