"""The whole tree: each room's section under its name."""

from consumers.algorithms.settings import AlgorithmSettings
from consumers.batching.settings import BatchingSettings
from consumers.intake.settings import IntakeSettings
from consumers.training.settings import TrainingSettings
from coordinator.scaling.settings import ScalingSettings
from coordinator.settings import CoordinatorSettings, RelaySettings
from deploy.bus.settings import KafkaSettings
from deploy.metrics.settings import MetricsSettings, TrackingSettings
from deploy.settings.sections import EmulationSettings, EvaluationSettings, ModelSettings, RunSettings
from deploy.telemetry.settings import TelemetrySettings
from producers.dispatch.settings import DispatchSettings
from producers.generation.settings import GenerationSettings
from producers.lengths.settings import LengthSettings
from producers.prompts.settings import DataSettings
from producers.rewards.settings import RewardSettings
from schemas.settings import LoopSettings, Section


class Settings(Section):
    """Everything that can be set; sections left out take their defaults, ``[data]`` is required.

    So is ``[model]``, unless generation and training are both emulated.
    """

    run: RunSettings = RunSettings()
    model: ModelSettings = ModelSettings()
    data: DataSettings
    rewards: RewardSettings = RewardSettings()
    loop: LoopSettings = LoopSettings()
    lengths: LengthSettings = LengthSettings()
    dispatch: DispatchSettings = DispatchSettings()
    generation: GenerationSettings = GenerationSettings()
    intake: IntakeSettings = IntakeSettings()
    batching: BatchingSettings = BatchingSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    training: TrainingSettings = TrainingSettings()
    coordinator: CoordinatorSettings = CoordinatorSettings()
    relay: RelaySettings = RelaySettings()
    scaling: ScalingSettings = ScalingSettings()
    kafka: KafkaSettings = KafkaSettings()
    metrics: MetricsSettings = MetricsSettings()
    tracking: TrackingSettings = TrackingSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    emulation: EmulationSettings = EmulationSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
