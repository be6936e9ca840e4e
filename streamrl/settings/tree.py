"""The whole tree of settings: the sections of all packages and of the optional features."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

from pydantic import Field, create_model, field_validator, model_validator

from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.batching.settings import BatchingSettings
from streamrl.consumers.ingest.settings import IngestSettings
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.coordinator.settings import CoordinatorSettings
from streamrl.observability.metrics.settings import MetricsSettings, TrackingSettings
from streamrl.observability.tracing.settings import TelemetrySettings
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.generation.engines.emulation_settings import EmulationSettings
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.producers.lengths.settings import LengthSettings
from streamrl.producers.prompts.settings import DataSettings
from streamrl.producers.rewards.settings import RewardSettings
from streamrl.schemas.errors import SettingsError
from streamrl.schemas.identifiers import INSTANCES, SERVED_POLICY, is_plain_name, parse_scope
from streamrl.schemas.profiles import DEFAULT_CURVE, DecodeCurve, DecodeSettings, DeviceProfile
from streamrl.schemas.settings import LoopSettings, Section
from streamrl.settings.feature_folders import feature_sections
from streamrl.weights.settings import RelaySettings

SectionOfKind = TypeVar("SectionOfKind", bound=Section)

# Sections that belong to no other package: the run, its devices and the model.


class RunSettings(Section):
    """``[run]``."""

    name: Annotated[
        str,
        Field(
            description="Prefix of the topics and name of the run's directory; unset: `streamrl run` derives one from "
            "the working directory's name and the time."
        ),
    ] = ""
    directory: Annotated[Path, Field(description="Directory that holds one directory per run.")] = Path("runs")
    instance: Annotated[
        str,
        Field(
            description="Name of the policy that a trainer trains. The run's own policy is `policy`. `streamrl attach` "
            "starts others, which keep their files in instances/<name>/ of the run's directory."
        ),
    ] = SERVED_POLICY
    seed: Annotated[int, Field(ge=0, description="Seed of prompts, sampling and training.")] = 0
    workers: Annotated[int, Field(ge=0, le=256, description="Generation workers that `streamrl run` starts.")] = 2
    max_workers: Annotated[
        int | None,
        Field(
            ge=1,
            le=256,
            description="Most workers that `streamrl run` scales up to as lengths grow; unset: no scaling.",
        ),
    ] = None
    trainer: Annotated[
        bool,
        Field(description="Whether `streamrl run` starts the trainer; if false, start `streamrl trainer` elsewhere."),
    ] = True
    max_restarts: Annotated[int, Field(ge=0, description="Restarts of one process before the run gives up.")] = 5
    stall_s: Annotated[
        float,
        Field(
            gt=0,
            description="Seconds without a step after which a warning says what the run waits for; never before five "
            "usual steps.",
        ),
    ] = 120.0
    log_files: Annotated[
        bool,
        Field(
            description="Whether a process that was started alone also writes its log into the run's directory. "
            "Processes of `streamrl run` always do."
        ),
    ] = False
    record_index: Annotated[
        bool,
        Field(description="Keep an index in the run's directory that finds each record's place on the topics."),
    ] = True
    audit: Annotated[
        bool, Field(description="Audit the run while it is running, as `streamrl audit --follow` does.")
    ] = False

    @field_validator("instance")
    @classmethod
    def _plain_instance(cls, name: str) -> str:
        if not is_plain_name(name) or "." in name:
            raise ValueError(f"expected 1 to 64 of a-z, 0-9, '_' and '-', got {name!r}")
        return name

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str) -> str:
        if name and not is_plain_name(name):
            raise ValueError(f"expected 1 to 64 of a-z, 0-9, '.', '_' and '-', got {name!r}")
        if parse_scope(name) != (name, SERVED_POLICY):
            raise ValueError(f"expected a name without '.policy.', which is for attached instances, got {name!r}")
        return name

    @model_validator(mode="after")
    def _grows(self) -> Self:
        if self.max_workers is not None and self.max_workers < max(1, self.workers):
            raise ValueError(f"expected run.max_workers >= run.workers ({self.workers}), got {self.max_workers}")
        return self

    @property
    def path(self) -> Path:
        """The directory of this run, or of this instance within it; raises the errors of ``run_path``."""
        run = self.run_path
        return run if self.instance == SERVED_POLICY else run / INSTANCES / self.instance

    @property
    def run_path(self) -> Path:
        """The directory of the run, also for its instances.

        Raises:
            SettingsError: the run has no name.
        """
        if not self.name:
            raise SettingsError(
                "expected run.name, got none: a run that was started without a name got one from its working directory "
                f"and the time; give it with --run.name, or give the configuration in the run's directory under "
                f"{self.directory}/"
            )
        return self.directory / self.name

    @property
    def weights_store(self) -> Path:
        """The directory through which the served policy's trainer passes weight versions to the relay."""
        return self.run_path / "weights"

    @property
    def own_weights_store(self) -> Path:
        """The same directory for a trainer whose policy is not served."""
        return self.weights_store_of(self.instance)

    def weights_store_of(self, policy: str) -> Path:
        """The same directory for any policy that is not served, by name."""
        return self.run_path / INSTANCES / policy / "weights"


class ModelSettings(Section):
    """``[model]``."""

    path: Annotated[
        str, Field(description="The policy to start from: a local HF directory or a hub id; required unless emulated.")
    ] = ""


DeviceNumber = Annotated[int, Field(ge=0, le=1023)]


class PlacementSettings(Section):
    """``[placement]``: CUDA devices of this machine by number, from 0; omitted ones are derived from the machine."""

    trainer: Annotated[
        tuple[DeviceNumber, ...] | None,
        Field(description="Devices of the trainer, one per rank; unset: the first ones."),
    ] = None
    workers: Annotated[
        tuple[tuple[DeviceNumber, ...], ...] | None,
        Field(
            description="A list of devices for each worker, generation's tensor_parallel_size times data_parallel_size "
            "long; unset: the devices after the trainer's. run.workers defaults to the number of lists."
        ),
    ] = None
    rewards: Annotated[
        tuple[DeviceNumber, ...],
        Field(
            description="Devices of reward processes, such as a judge's, assigned to workers in turn; empty: the CPU."
        ),
    ] = ()
    share: Annotated[bool, Field(description="Whether several processes may share a device and divide its memory.")] = (
        False
    )


class EvaluationSettings(Section):
    """``[evaluation]``."""

    function: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Before and after a run: package.module:function (model directory, seed) -> {'metrics': "
            "{...}, 'samples': [...], 'prompts': number of prompts}; the last two may be left out",
        ),
    ] = None


class CoreSettings(Section):
    """The settings that exist without any optional feature. A section that is left out takes its defaults.

    ``[data]`` is required. So is ``[model]``, unless generation and training are both emulated.
    """

    run: RunSettings = RunSettings()
    placement: PlacementSettings = PlacementSettings()
    model: ModelSettings = ModelSettings()
    data: DataSettings  # without a default, because nothing can replace the user's prompts
    rewards: RewardSettings = RewardSettings()
    loop: LoopSettings = LoopSettings()
    lengths: LengthSettings = LengthSettings()
    dispatch: DispatchSettings = DispatchSettings()
    generation: GenerationSettings = GenerationSettings()
    ingest: IngestSettings = IngestSettings()
    batching: BatchingSettings = BatchingSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    training: TrainingSettings = TrainingSettings()
    coordinator: CoordinatorSettings = CoordinatorSettings()
    relay: RelaySettings = RelaySettings()
    kafka: KafkaSettings = KafkaSettings()
    metrics: MetricsSettings = MetricsSettings()
    tracking: TrackingSettings = TrackingSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    emulation: EmulationSettings = EmulationSettings()
    evaluation: EvaluationSettings = EvaluationSettings()

    @property
    def checkpoint_location(self) -> str | Path:
        """Where the trainer keeps its checkpoints: ``training.checkpoint_location``, else the trainer's directory."""
        return self.training.checkpoint_location or self.run.path / "checkpoints"

    def section(self, kind: type[SectionOfKind]) -> SectionOfKind:
        """The section of this class, such as one that a feature added.

        Raises:
            LookupError: there is none, because the feature is not in this tree.
        """
        for section in vars(self).values():
            if isinstance(section, kind):
                return section
        raise LookupError(f"expected a section {kind.__name__}, got none: its feature is not in this tree")


def _with_features(core: type[CoreSettings]) -> type[CoreSettings]:
    """The core's settings class with the sections and keys that features add."""
    fields: dict[str, Any] = {}
    for name, classes in feature_sections().items():
        known = core.model_fields.get(name)
        own: tuple[type[Section], ...] = () if known is None else (type(known.default),)
        bases = (*classes, *(one for one in own if not any(issubclass(each, one) for each in classes)))
        section: type[Section] = classes[0]
        if len(bases) > 1:
            section = type(
                f"Extended{classes[0].__name__}", bases, {"__doc__": classes[0].__doc__, "__module__": __name__}
            )
            globals()[section.__name__] = section  # where pickle finds it
        fields[name] = (section, section())
    return create_model("Settings", __base__=core, __module__=__name__, **fields)


if TYPE_CHECKING:

    class Settings(CoreSettings):
        """Everything that can be set."""
else:
    Settings = _with_features(CoreSettings)


def sampling_seed(settings: Settings) -> int | None:
    """The seed for the ``transformers`` engine; None for others, because vLLM samples seeded requests one by one."""
    return settings.run.seed if settings.generation.engine == "transformers" else None


def decode_curve(settings: Settings) -> DecodeCurve:
    """The duration of a worker's decode steps in wall-clock seconds: measured, emulated, or typical.

    Raises:
        SettingsError: the profile cannot be read.
    """
    # A measured profile that is given to the dispatcher takes precedence over the emulated curve.
    if settings.dispatch.profile is not None:
        return _in_wall_clock(settings, DeviceProfile.read(settings.dispatch.profile).decode)
    if settings.generation.engine == "emulated":
        return _in_wall_clock(settings, settings.emulation.decode)
    return DEFAULT_CURVE


def worker_curves(settings: Settings) -> dict[str, DecodeCurve]:
    """The same for workers that have their own profiles, by the worker's id or its engine's name.

    Raises:
        SettingsError: a profile cannot be read.
    """
    profiles = settings.dispatch.profiles.items()
    return {name: _in_wall_clock(settings, DeviceProfile.read(path).decode) for name, path in profiles}


def _in_wall_clock(settings: Settings, decode: DecodeSettings) -> DecodeCurve:
    # The dispatcher plans in seconds of the wall clock, so emulated seconds are converted.
    scale = settings.emulation.time_scale if settings.generation.engine == "emulated" else 1.0
    return DecodeCurve(decode).times(1 / scale)
