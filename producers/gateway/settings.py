"""``[gateway]``: where requesters come in, how much they may ask for, and what is kept for feedback."""

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
    model_name: Annotated[
        str | None, Field(min_length=1, max_length=256, description="What requests call the model; unset: run.name.")
    ] = None
    require_key: Annotated[
        bool, Field(description="Answer holders of an API key only; without, only on a loopback address.")
    ] = True
    keys: Annotated[
        Path | None,
        Field(description="File of `streamrl gateway keys add`; unset: gateway/keys.json in the run's directory."),
    ] = None
    allowed_hosts: Annotated[
        tuple[str, ...],
        Field(description="Names under which requests may come, besides localhost, gateway.host and any address."),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...], Field(description="Web pages, such as https://chat.example.org, whose scripts may ask.")
    ] = ()
    max_body_bytes: Annotated[int, Field(ge=1024, le=64 << 20, description="Largest request.")] = 4 << 20
    max_sequences: Annotated[
        int, Field(ge=1, le=4096, description="Most completions of one request: its prompts times n.")
    ] = 64
    max_queued: Annotated[
        int, Field(ge=0, description="Completions that may wait for a slot; who comes beyond is told 429.")
    ] = 256
    queue_timeout_s: Annotated[
        float, Field(gt=0, description="Longest wait for a slot; then 429, with a time after which to ask again.")
    ] = 10.0
    request_timeout_s: Annotated[float, Field(gt=0, description="Longest time of a whole request.")] = 600.0
    body_timeout_s: Annotated[float, Field(gt=0, description="Longest time in which a request is sent.")] = 30.0
    reader_timeout_s: Annotated[
        float, Field(gt=0, description="A reader of a stream that takes nothing for so long is disconnected.")
    ] = 30.0
    shutdown_timeout_s: Annotated[
        float, Field(gt=0, description="After SIGTERM: time for requests under way, while no new ones are taken.")
    ] = 15.0
    tool_parser: Annotated[
        str,
        Field(
            description="How the model writes tool calls: hermes (<tool_call>{...}</tool_call>), json, or with vLLM "
            "installed the name of one of its tool parsers."
        ),
    ] = "hermes"
    feedback_timeout_s: Annotated[
        float,
        Field(gt=0, description="So long after its end a completion can be given a reward; then it is forgotten."),
    ] = 3600.0
    max_awaiting_feedback: Annotated[
        int,
        Field(ge=0, description="Requests kept for feedback or for the broker; the oldest are dropped, and counted."),
    ] = 100_000
    max_sessions: Annotated[
        int,
        Field(
            ge=1,
            description="Sessions under way at once, each a trajectory in the making; those idle longest are dropped, "
            "and counted.",
        ),
    ] = 4096
    reward_name: Annotated[
        str,
        Field(min_length=1, max_length=64, description="Name of the reward that feedback gives; see rewards.weights."),
    ] = "feedback"

    def key_file(self, directory: Path) -> Path:
        """Where API keys are; ``directory``: the gateway's of the run."""
        return self.keys or directory / "keys.json"

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        if not self.require_key and not is_loopback(self.host):
            raise ValueError(
                f"expected gateway.require_key where others reach gateway.host ({self.host}), got it switched off; "
                "switch it on, or listen on 127.0.0.1"
            )
        return self


SECTIONS = {"gateway": GatewaySettings}
