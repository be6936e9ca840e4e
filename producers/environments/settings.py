"""``[environments]``: which environments are played, how many episodes at once, and for how long each."""

from typing import Annotated, Self

from pydantic import Field, JsonValue, SecretStr, model_validator

from streamrl.producers.environments.shipped import SHIPPED
from streamrl.producers.rewards.settings import RewardSettings
from streamrl.schemas.settings import Section

FUNCTION = "streamrl.producers.environments.episodes:play"
"""What an environment's processes run: an episode is scored as a completion is."""


class EnvironmentSettings(Section):
    """``[environments]``: tasks of several turns, which the policy plays through the run's own gateway."""

    names: Annotated[
        tuple[str, ...],
        Field(
            description="calculator, guess or python, which come along; verifiers:ENVIRONMENT, openenv:URL; "
            "package.module:Class of your own, or a function that makes one."
        ),
    ] = ()
    options: Annotated[
        dict[str, dict[str, JsonValue]], Field(description="By name: what an environment is made with.")
    ] = {}
    episodes_per_task: Annotated[
        int | None,
        Field(ge=1, le=4096, description="Episodes of one task, whose rewards are compared; unset: num_generations."),
    ] = None
    max_concurrent: Annotated[
        int, Field(ge=1, le=4096, description="Episodes under way at once, of each environment.")
    ] = 32
    max_turns: Annotated[int, Field(ge=1, le=1024, description="Turns of the policy in one episode.")] = 16
    episode_timeout_s: Annotated[
        float, Field(gt=0, description="Longest time of one episode; one that takes longer counts for nothing.")
    ] = 300.0
    load_timeout_s: Annotated[float, Field(gt=0, description="Most seconds an environment may take to load.")] = 120.0
    environment: Annotated[
        tuple[str, ...],
        Field(
            description="Variables of our environment that an environment's process gets besides what programs need."
        ),
    ] = ()
    max_memory_bytes: Annotated[
        int | None, Field(ge=256 << 20, description="Most address space of an environment's process.")
    ] = None
    gateway: Annotated[
        str | None, Field(description="Address of the gateway, such as http://host:8000; unset: the run's own.")
    ] = None
    api_key: Annotated[
        SecretStr | None,
        Field(description="A key of that gateway, with --train; unset: one is made in the run's directory."),
    ] = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for name in self.names:
            if name not in SHIPPED and ":" not in name.strip(":"):
                raise ValueError(
                    f"expected one of {', '.join(SHIPPED)}, verifiers:ENVIRONMENT, openenv:URL or "
                    f"package.module:Class, got {name!r}"
                )
        if unknown := set(self.options) - set(self.names):
            raise ValueError(f"expected options of environments.names, got some of {sorted(unknown)}")
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"expected each environment once, got {self.names}")
        return self

    def process_settings(self) -> RewardSettings:
        """An episode is a call of a process that confines, times out, restarts and blames as a reward's does."""
        return RewardSettings(
            functions=(FUNCTION,),
            timeout_s=self.episode_timeout_s,
            load_timeout_s=self.load_timeout_s,
            concurrency=min(1024, self.max_concurrent),
            environment=self.environment,
            max_memory_bytes=self.max_memory_bytes,
        )


SECTIONS = {"environments": EnvironmentSettings}
