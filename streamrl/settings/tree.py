"""The whole tree: each room's section under its name, and those of the optional features."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

from pydantic import Field, create_model, field_validator, model_validator

from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.batching.settings import BatchingSettings
from streamrl.consumers.ingest.settings import IngestSettings
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.coordinator.settings import CoordinatorSettings, ScalingSettings
from streamrl.observability.metrics.settings import MetricsSettings, TrackingSettings
from streamrl.observability.tracing.settings import TelemetrySettings
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.generation.engines.length_trace import LengthTraceSettings
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.producers.lengths.settings import LengthSettings
from streamrl.producers.prompts.settings import DataSettings
from streamrl.producers.rewards.settings import RewardSettings
from streamrl.schemas.errors import SettingsError
from streamrl.schemas.identifiers import INSTANCES, SERVED_POLICY, is_plain_name, run_and_policy
from streamrl.schemas.profiles import TYPICAL_CURVE, DecodeCurve, DecodeSettings, DeviceProfile, TrainingCosts
from streamrl.schemas.settings import UNSET, LoopSettings, Section
from streamrl.settings.feature_folders import feature_sections
from streamrl.weights.settings import RelaySettings

SectionOfKind = TypeVar("SectionOfKind", bound=Section)

# The sections that belong to no room: the run itself and its devices, the model or what stands in for it.


class RunSettings(Section):
    """``[run]``."""

    name: Annotated[
        str,
        Field(
            description="Prefix of the topics and name of the run's directory; unset: `streamrl run` makes one of the "
            "working directory's name and the time."
        ),
    ] = ""
    directory: Annotated[Path, Field(description="Where runs keep their directories.")] = Path("runs")
    instance: Annotated[
        str,
        Field(
            description="Name of the policy that a trainer trains: the run's own is `policy`; of others, which "
            "`streamrl attach` starts, all that they keep lies in instances/<name>/ of the run's directory."
        ),
    ] = SERVED_POLICY
    seed: Annotated[int, Field(ge=0, description="Seed of prompts, sampling and training.")] = 0
    workers: Annotated[int, Field(ge=0, le=256, description="Generation workers that `streamrl run` starts.")] = 2
    max_workers: Annotated[
        int | None,
        Field(ge=1, le=256, description="Workers that it may add as lengths grow; unset: their number stays."),
    ] = None
    trainer: Annotated[
        bool,
        Field(
            description="Whether `streamrl run` starts the trainer; if not, `streamrl trainer` joins from elsewhere."
        ),
    ] = True
    max_restarts: Annotated[int, Field(ge=0, description="Restarts of one process before the run gives up.")] = 5
    watchdog_s: Annotated[
        float, Field(gt=0, description="A process that makes no progress for so long ends, and is started anew.")
    ] = 120.0
    log_max_bytes: Annotated[
        int, Field(ge=1 << 16, description="Size at which a process's log in the run's directory becomes a copy.")
    ] = 32 << 20
    log_backup_count: Annotated[int, Field(ge=0, le=100, description="Such copies that are kept of each log.")] = 3
    log_files: Annotated[
        bool,
        Field(
            description="A process by itself also writes its log into the run's directory, as `streamrl run` has its "
            "processes do."
        ),
    ] = False
    record_index: Annotated[
        bool,
        Field(description="Keep a file of where each record stands in the run's directory, for who looks."),
    ] = True
    audit: Annotated[
        bool, Field(description="Audit the run while it goes on, as `streamrl audit --follow` does beside it.")
    ] = False
    shutdown_grace_s: Annotated[float, Field(gt=0, description="Time to end cleanly after Ctrl-C or SIGTERM.")] = 20.0

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
        if run_and_policy(name) != (name, SERVED_POLICY):
            raise ValueError(f"expected a name without '.policy.', which is for attached instances, got {name!r}")
        return name

    @model_validator(mode="after")
    def _grows(self) -> Self:
        if self.max_workers is not None and self.max_workers < max(1, self.workers):
            raise ValueError(f"expected run.max_workers >= run.workers ({self.workers}), got {self.max_workers}")
        return self

    @property
    def path(self) -> Path:
        """The run's own directory; an instance's own within it; raises what ``run_path`` does."""
        run = self.run_path
        return run if self.instance == SERVED_POLICY else run / INSTANCES / self.instance

    @property
    def run_path(self) -> Path:
        """The run's own directory.

        Raises:
            SettingsError: the run has no name.
        """
        if not self.name:
            raise SettingsError(
                "expected run.name, got none: a run that was started without one is named after its working directory "
                f"and the time; name it with --run.name, or give the configuration in its directory under "
                f"{self.directory}/"
            )
        return self.directory / self.name

    @property
    def weights_store(self) -> Path:
        """Where the trainer of the policy that is served puts weight versions and the relay finds them."""
        return self.run_path / "weights"

    @property
    def own_weights_store(self) -> Path:
        """Where a trainer puts them whose policy is not served."""
        return self.weights_store_of(self.instance)

    def weights_store_of(self, policy: str) -> Path:
        """The same of any policy, by name."""
        return self.run_path / INSTANCES / policy / "weights"


class ModelSettings(Section):
    """``[model]``."""

    path: Annotated[
        str, Field(description="The policy to start from: a local HF directory or a hub id; needed unless emulated.")
    ] = ""


DeviceNumber = Annotated[int, Field(ge=0, le=1023)]


class PlacementSettings(Section):
    """``[placement]``: CUDA devices of this machine by number, from 0; what is left out is derived from what it has."""

    trainer: Annotated[
        tuple[DeviceNumber, ...] | None,
        Field(description="Devices of the trainer, one a rank; unset: the first."),
    ] = None
    workers: Annotated[
        tuple[tuple[DeviceNumber, ...], ...] | None,
        Field(
            description="Of each worker a list, as long as generation's tensor_parallel_size times data_parallel_size; "
            "unset: the next ones. run.workers follows it where that is left out."
        ),
    ] = None
    rewards: Annotated[
        tuple[DeviceNumber, ...],
        Field(
            description="Devices of reward processes, such as a judge's: dealt to the workers' in turn; none: the CPU."
        ),
    ] = ()
    share: Annotated[
        bool, Field(description="Whether one device may be given to several processes, which divide its memory.")
    ] = False


class EmulationSettings(Section):
    """``[emulation]``: in place of a model, for ``generation.engine`` and ``training.backend`` = "emulated"."""

    time_scale: Annotated[float, Field(gt=0, description="Emulated seconds in one second of the wall clock.")] = 100.0
    profile: Annotated[
        Path | None,
        Field(description="What `streamrl profile` measured; emulation.decode and emulation.training come from it."),
    ] = None
    decode: DecodeSettings = DecodeSettings()
    lengths: LengthTraceSettings = LengthTraceSettings()
    training: TrainingCosts = TrainingCosts()

    @model_validator(mode="before")
    @classmethod
    def _profiled(cls, values: Any) -> Any:
        """Decoding and training take the profile's times; sections that say otherwise are refused."""
        # Before the sections are validated, so values are as given: the word for "unset" is still a word.
        if not isinstance(values, dict) or values.get("profile") in (None, UNSET):
            return values
        profile = DeviceProfile.read(Path(values["profile"]))
        for name, measured in (("decode", profile.decode), ("training", profile.training)):
            # Equal ones are let through: the resolved settings of a run, read again, name both.
            if name in values and type(measured).model_validate(values[name]) != measured:
                raise ValueError(
                    f"expected emulation.{name} to come from the profile {values['profile']}, "
                    f"got other values for it; leave out one of the two"
                )
        return values | {"decode": profile.decode, "training": profile.training}


class EvaluationSettings(Section):
    """``[evaluation]``."""

    function: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Before and after a run: package.module:function (model directory, seed) -> {'metrics': "
            "{...}, 'samples': [...]}",
        ),
    ] = None


class CoreSettings(Section):
    """What can be set without any optional feature; sections left out take their defaults, ``[data]`` is required.

    So is ``[model]``, unless generation and training are both emulated.
    """

    run: RunSettings = RunSettings()
    placement: PlacementSettings = PlacementSettings()
    model: ModelSettings = ModelSettings()
    data: DataSettings  # without a default: nothing stands for the user's prompts
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
    scaling: ScalingSettings = ScalingSettings()
    kafka: KafkaSettings = KafkaSettings()
    metrics: MetricsSettings = MetricsSettings()
    tracking: TrackingSettings = TrackingSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    emulation: EmulationSettings = EmulationSettings()
    evaluation: EvaluationSettings = EvaluationSettings()

    @property
    def checkpoint_location(self) -> str | Path:
        """Where the trainer keeps its checkpoints: as the settings say, else in its own directory."""
        return self.training.checkpoint_location or self.run.path / "checkpoints"

    def section(self, kind: type[SectionOfKind]) -> SectionOfKind:
        """The section of this class, such as one that a feature added.

        Raises:
            LookupError: there is none, since the feature is not in this tree.
        """
        for section in vars(self).values():
            if isinstance(section, kind):
                return section
        raise LookupError(f"expected a section {kind.__name__}, got none: its feature is not in this tree")


def _with_features(core: type[CoreSettings]) -> type[CoreSettings]:
    """The core's sections, extended and accompanied by those of the features."""
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
    """None for vLLM, which draws seeded requests one by one; our own engine draws all rows at once in any case."""
    return settings.run.seed if settings.generation.engine == "transformers" else None


def decode_curve(settings: Settings) -> DecodeCurve:
    """A worker's decode steps in seconds of the wall clock: as measured, as emulated, or typical ones.

    Raises:
        SettingsError: the profile cannot be read.
    """
    # A profile given to the dispatcher goes before the emulated curve: what was measured is what it shall plan with.
    if settings.dispatch.profile is not None:
        return _of_wall_clock(settings, DeviceProfile.read(settings.dispatch.profile).decode)
    if settings.generation.engine == "emulated":
        return _of_wall_clock(settings, settings.emulation.decode)
    return TYPICAL_CURVE


def worker_curves(settings: Settings) -> dict[str, DecodeCurve]:
    """The same of the workers that have profiles of their own, by their id or by their engine's name.

    Raises:
        SettingsError: a profile cannot be read.
    """
    profiles = settings.dispatch.profiles.items()
    return {name: _of_wall_clock(settings, DeviceProfile.read(path).decode) for name, path in profiles}


def _of_wall_clock(settings: Settings, decode: DecodeSettings) -> DecodeCurve:
    # Emulated seconds become those of the wall clock, in which the dispatcher plans.
    scale = settings.emulation.time_scale if settings.generation.engine == "emulated" else 1.0
    return DecodeCurve(decode).times(1 / scale)
