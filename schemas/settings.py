"""The settings that producers and consumers must agree on. A package's own settings live in that package."""

from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from streamrl.schemas.secrets import is_secret
from streamrl.schemas.trajectories import SamplingParams, StopStrings

UNSET = "none"
"""The word in a configuration file for a setting without a value."""


class Section(BaseModel):
    """A section of the configuration: frozen, and unknown keys are refused."""

    # Error texts leave the input out: any code may log an error, and the input may be a secret.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _unset(cls, values: Any) -> Any:
        """Turns ``UNSET`` into None where a setting may be unset, because TOML and command lines have no null.

        For a secret, the empty text means unset, because any word may be a secret. An empty variable often comes from a
        script that passes on a variable that is not set.
        """
        if not isinstance(values, dict):
            return values
        optional = {name: field for name, field in cls.model_fields.items() if type(None) in get_args(field.annotation)}
        unset = {name: "" if is_secret(field.annotation) else UNSET for name, field in optional.items()}
        return {name: None if name in unset and value == unset[name] else value for name, value in values.items()}


class SettingsTable(Section):
    """A part of a section that counts as one setting, such as measured values, which a profile can replace."""


class LoopSettings(Section):
    """``[loop]``: the shape of the loop. Names are TRL's where TRL has one."""

    shards: ClassVar[int] = 2
    """Partitions per length bucket. No setting: a trainer reads all of them, and two keep several graders busy."""

    groups_per_step: Annotated[int, Field(ge=1, description="Prompts (groups) in one optimizer step.")] = 32
    num_generations: Annotated[int, Field(ge=1, description="Completions sampled per prompt.")] = 8
    mode: Annotated[
        Literal["synchronous", "stream", "one_step_async", "trajectory_async"],
        Field(
            description="synchronous: generate a whole batch, then train it; stream: train it while it is generated; "
            "one_step_async: generate the next batch during training; trajectory_async: never wait for a batch."
        ),
    ] = "trajectory_async"
    max_staleness: Annotated[
        int,
        Field(ge=0, description="trajectory_async: maximum age of a trained token, in optimizer steps."),
    ] = 4
    max_prompt_length: Annotated[
        int, Field(ge=1, description="Tokens of the longest prompt; longer ones end in an error.")
    ] = 1024
    max_completion_length: Annotated[int, Field(ge=1, description="Most tokens sampled per completion.")] = 1024
    temperature: Annotated[float, Field(gt=0, le=100, description="Sampling temperature.")] = 1.0
    top_p: Annotated[
        float,
        Field(gt=0, le=1, description="Sample among the likeliest tokens that sum to this probability; 1 keeps all."),
    ] = 1.0
    top_k: Annotated[
        int, Field(ge=0, description="Sample only among this many likeliest tokens; 0 keeps the whole vocabulary.")
    ] = 0
    min_p: Annotated[
        float,
        Field(ge=0, le=1, description="Drop tokens less likely than this share of the likeliest one; 0 keeps all."),
    ] = 0.0
    stop: Annotated[
        StopStrings,
        Field(description="Strings that end a completion. All sampled tokens are trained, the string's tokens too."),
    ] = ()
    include_stop_str_in_output: Annotated[
        bool, Field(description="Whether the text that rewards see includes the stop string.")
    ] = False
    skip_special_tokens: Annotated[
        bool,
        Field(
            description="Whether the text that rewards see leaves out special tokens, such as a model's <think>. It "
            "never has the token that ended the completion."
        ),
    ] = True
    bucket_boundaries: Annotated[
        tuple[int, ...],
        Field(description="Ascending output lengths in tokens that separate the length buckets; n make n + 1 buckets."),
    ] = (64, 256, 1024)
    heartbeat_timeout_s: Annotated[
        float,
        Field(gt=0, description="Seconds of silence after which a worker or relay is lost and its orders move on."),
    ] = 8.0

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if list(self.bucket_boundaries) != sorted(set(self.bucket_boundaries)):
            raise ValueError(f"loop.bucket_boundaries must be ascending, got {self.bucket_boundaries}")
        return self

    @property
    def num_buckets(self) -> int:
        """Number of length buckets: one more than boundaries."""
        return len(self.bucket_boundaries) + 1

    @property
    def trajectory_partitions(self) -> int:
        """Partitions of the trajectories topic: buckets × shards."""
        return self.num_buckets * self.shards

    @property
    def staleness_bound(self) -> int:
        """Maximum age of a trained token in optimizer steps; the mode fixes it, or ``max_staleness`` does."""
        match self.mode:
            case "synchronous" | "stream":
                return 0
            case "one_step_async":
                return 1
            case "trajectory_async":
                return self.max_staleness

    @property
    def has_fixed_batches(self) -> bool:
        """Whether a group's admission fixes the step that trains it; otherwise a step takes complete groups."""
        return self.mode == "one_step_async"

    @property
    def step_samples(self) -> int:
        """Samples of the groups of one step."""
        return self.groups_per_step * self.num_generations

    @property
    def max_groups_in_flight(self) -> int:
        """Most groups that are admitted and not yet consumed: (staleness_bound + 1) × groups_per_step."""
        return (self.staleness_bound + 1) * self.groups_per_step

    def sampling_params(self, seed: int | None = None) -> SamplingParams:
        """Sampling parameters of every completion of the run; ``seed``: the order's, None lets the engine choose."""
        return SamplingParams(
            max_completion_length=self.max_completion_length,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop=self.stop,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            seed=seed,
        )

    def bucket_of(self, length: int) -> int:
        """The bucket of an output length: the number of boundaries at or below it."""
        return sum(length >= boundary for boundary in self.bucket_boundaries)

    def partition_of(self, bucket: int, shard: int) -> int:
        """Partition of the trajectories topic: bucket × shards + shard."""
        return bucket * self.shards + shard % self.shards
