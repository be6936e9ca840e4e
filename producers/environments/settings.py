"""``[environments]``: which environments are played, and the limits of episodes."""

from typing import Annotated, Self

from pydantic import Field, JsonValue, SecretStr, model_validator

from streamrl.producers.environments.shipped import SHIPPED
from streamrl.producers.rewards.settings import RewardSettings
from streamrl.schemas.settings import Section

FUNCTION = "streamrl.producers.environments.episodes:play"
"""Function that an environment's processes run, in the place of a reward function."""


class EnvironmentSettings(Section):
    """``[environments]``: tasks of several turns, which the policy plays through a gateway."""

    names: Annotated[
        tuple[str, ...],
        Field(
            description="Built in: calculator, guess, python. Of libraries: verifiers:ENVIRONMENT, openenv:URL. Your "
            "own: package.module:NAME of a class, or of a function that makes an environment."
        ),
    ] = ()
    options: Annotated[
        dict[str, dict[str, JsonValue]],
        Field(description="Arguments with which each environment is made, by the environment's name."),
    ] = {}
    max_concurrent: Annotated[
        int, Field(ge=1, le=4096, description="Episodes of each environment that run at the same time.")
    ] = 32
    max_turns: Annotated[int, Field(ge=1, le=1024, description="Most turns of the policy in one episode.")] = 16
    episode_timeout_s: Annotated[
        float, Field(gt=0, description="Longest time of one episode; an episode that takes longer fails.")
    ] = 300.0
    environment: Annotated[
        tuple[str, ...],
        Field(
            description="Names of environment variables that are passed on to an environment's process, besides the "
            "usual ones."
        ),
    ] = ()
    gateway: Annotated[
        str | None, Field(description="Address of the gateway, such as http://host:8000; unset: the run's own.")
    ] = None
    api_key: Annotated[
        SecretStr | None,
        Field(description="An API key of that gateway, made with --train; unset: the run makes one."),
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
            raise ValueError(
                f"expected environments.options for environments in environments.names, got some for {sorted(unknown)}"
            )
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"expected each environment once in environments.names, got {self.names}")
        return self

    def process_settings(self) -> RewardSettings:
        """Settings of the processes that play episodes, which are run like the processes of a reward function."""
        return RewardSettings(
            functions=(FUNCTION,),
            timeout_s=self.episode_timeout_s,
            concurrency=min(1024, self.max_concurrent),
            environment=self.environment,
        )


SECTIONS = {"environments": EnvironmentSettings}
