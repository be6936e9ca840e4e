"""The settings that producers and consumers must agree on; each room's own settings live beside the room."""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from streamrl.schemas.secrets import is_secret
from streamrl.schemas.trajectories import SamplingParams, StopStrings

UNSET = "none"
"""What a configuration file says where a setting shall have no value."""


class Section(BaseModel):
    """A section of the configuration: frozen, and closed against unknown keys."""

    # Without the input in its text: an error may be logged by whoever meets it, and the input may be a secret.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _unset(cls, values: Any) -> Any:
        """TOML and command lines have no null: the word stands for it where a setting may be unset.

        Any word may be a secret; for one, the empty text does: a variable that is passed on though nobody set it.
        """
        if not isinstance(values, dict):
            return values
        optional = {name: field for name, field in cls.model_fields.items() if type(None) in get_args(field.annotation)}
        unset = {name: "" if is_secret(field.annotation) else UNSET for name, field in optional.items()}
        return {name: None if name in unset and value == unset[name] else value for name, value in values.items()}


class LoopSettings(Section):
    """``[loop]``: the shape of the loop. Names are TRL's where TRL has one."""

    groups_per_step: Annotated[int, Field(ge=1, description="Prompts (groups) in one optimizer step.")] = 32
    num_generations: Annotated[int, Field(ge=1, description="Completions sampled per prompt.")] = 8
    mode: Annotated[
        Literal["synchronous", "stream", "one_step_async", "trajectory_async"],
        Field(
            description="synchronous: generate a whole batch, then train it; stream: train it while it is generated; "
            "one_step_async: generate the next batch meanwhile; trajectory_async: never wait for a batch."
        ),
    ] = "trajectory_async"
    max_staleness: Annotated[
        int,
        Field(ge=0, description="trajectory_async: most optimizer steps a trained token may be old."),
    ] = 4
    max_prompt_length: Annotated[
        int, Field(ge=1, description="Longest prompt in tokens; longer ones end in error.")
    ] = 1024
    max_completion_length: Annotated[int, Field(ge=1, description="Most tokens sampled per completion.")] = 1024
    temperature: Annotated[float, Field(gt=0, le=100, description="Sampling temperature.")] = 1.0
    top_p: Annotated[
        float,
        Field(gt=0, le=1, description="Sample among the likeliest tokens that sum to this probability; 1 keeps all."),
    ] = 1.0
    top_k: Annotated[
        int, Field(ge=0, description="Sample among so many likeliest tokens; 0 keeps the whole vocabulary.")
    ] = 0
    min_p: Annotated[
        float,
        Field(ge=0, le=1, description="Sample no token less likely than this share of the likeliest one; 0 keeps all."),
    ] = 0.0
    stop: Annotated[
        StopStrings,
        Field(description="Strings that end a completion; all tokens sampled are trained, those of the string too."),
    ] = ()
    include_stop_str_in_output: Annotated[
        bool, Field(description="Whether the text that rewards see ends with the stop string or before it.")
    ] = False
    bucket_boundaries: Annotated[
        tuple[int, ...],
        Field(description="Ascending output lengths in tokens that part the length buckets; n make n + 1 buckets."),
    ] = (64, 256, 1024)
    shards: Annotated[int, Field(ge=1, le=64, description="Partitions per length bucket.")] = 2
    heartbeat_timeout_s: Annotated[
        float,
        Field(gt=0, description="A worker or relay that is silent for longer is lost; its orders go to other workers."),
    ] = 8.0

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if list(self.bucket_boundaries) != sorted(set(self.bucket_boundaries)):
            raise ValueError(f"loop.bucket_boundaries must be ascending, got {self.bucket_boundaries}")
        return self

    @property
    def num_buckets(self) -> int:
        """Length buckets: one more than there are boundaries."""
        return len(self.bucket_boundaries) + 1

    @property
    def trajectory_partitions(self) -> int:
        """Partitions of the trajectories topic: buckets × shards."""
        return self.num_buckets * self.shards

    @property
    def staleness_bound(self) -> int:
        """Most optimizer steps a trained token may be old: what the mode says, or ``max_staleness``."""
        match self.mode:
            case "synchronous" | "stream":
                return 0
            case "one_step_async":
                return 1
            case "trajectory_async":
                return self.max_staleness

    @property
    def has_fixed_batches(self) -> bool:
        """Whether the step that trains a group is settled when it is admitted; else a step takes what is whole."""
        return self.mode == "one_step_async"

    @property
    def max_groups_in_flight(self) -> int:
        """Groups admitted and not yet consumed, at most: (staleness_bound + 1) × groups_per_step."""
        return (self.staleness_bound + 1) * self.groups_per_step

    def sampling_params(self, seed: int | None = None) -> SamplingParams:
        """How every completion of the run is sampled; ``seed``: of the order, none leaves it to the engine."""
        return SamplingParams(
            max_completion_length=self.max_completion_length,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop=self.stop,
            include_stop_str_in_output=self.include_stop_str_in_output,
            seed=seed,
        )

    def bucket_of(self, length: int) -> int:
        """The bucket of an output length: the number of boundaries at or below it."""
        return sum(length >= boundary for boundary in self.bucket_boundaries)

    def partition_of(self, bucket: int, shard: int) -> int:
        """Partition of the trajectories topic: bucket × shards + shard."""
        return bucket * self.shards + shard % self.shards
