"""``[gateway]``: where the gateway listens, whom it answers, and how long it keeps completions for feedback."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from streamrl.schemas.hosts import is_loopback
from streamrl.schemas.settings import Section


class GatewaySettings(Section):
    """``[gateway]``: the OpenAI-compatible server in front of the workers."""

    enabled: Annotated[
        bool, Field(description="`streamrl run` starts a gateway, and workers keep slots for its requests.")
    ] = False
    host: Annotated[str, Field(description="Address to listen on; this machine alone by default.")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535, description="Port to listen on; 0 takes a free one.")] = 8000
    require_key: Annotated[
        bool, Field(description="Answer only requests with an API key. May be off on a loopback address only.")
    ] = True
    keys: Annotated[
        Path | None,
        Field(description="File of `streamrl gateway keys`; unset: gateway/keys.json in the run's directory."),
    ] = None
    allowed_hosts: Annotated[
        tuple[str, ...],
        Field(description="Host names that requests may use, besides localhost, gateway.host and any IP address."),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Field(description="Origins of web pages whose scripts may send requests, such as https://chat.example.org."),
    ] = ()
    max_queued: Annotated[
        int, Field(ge=0, description="Completions that may wait for a slot; further requests get status 429.")
    ] = 256
    tool_parser: Annotated[
        str,
        Field(
            description="How the model writes tool calls: hermes (<tool_call>{...}</tool_call>), json, or, if vLLM is "
            "installed, the name of one of vLLM's tool parsers."
        ),
    ] = "hermes"
    feedback_timeout_s: Annotated[
        float,
        Field(gt=0, description="Seconds after its end for which a completion can get a reward; then it is deleted."),
    ] = 3600.0

    def key_file(self, directory: Path) -> Path:
        """The file of API keys. ``directory``: the gateway's, in the run's directory."""
        return self.keys or directory / "keys.json"

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        if not self.require_key and not is_loopback(self.host):
            raise ValueError(
                f"expected gateway.require_key, since other machines can reach gateway.host ({self.host}), got false; "
                "set it to true, or listen on 127.0.0.1"
            )
        return self


SECTIONS = {"gateway": GatewaySettings}
