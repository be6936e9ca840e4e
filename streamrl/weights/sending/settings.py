"""``[sender]``: how weights get into vLLM's processes without files."""

from typing import Annotated, Literal

from pydantic import Field

from streamrl.schemas.settings import Section


class SenderSettings(Section):
    """``[sender]``: sends weights straight into the processes of vLLM engines, by vLLM's own weight transfer."""

    backend: Annotated[
        Literal["none", "nccl", "gloo"],
        Field(
            description="How a sender next to the trainer's store puts weights into vLLM's processes: "
            '"nccl" from GPU to GPU, "gloo" from memory to memory; "none": no sender, workers fetch files.'
        ),
    ] = "none"
    host: Annotated[str, Field(description="Address to listen on, at which engines' processes reach the sender.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Field(ge=0, le=65535, description="0: `streamrl run` picks a free one.")] = 0

    @property
    def transfer(self) -> str:
        """The transport's name in vLLM; empty: there is no sender."""
        return "" if self.backend == "none" else self.backend

    @property
    def address(self) -> str:
        """Where workers request turns; empty: there is no sender, or its port is not known."""
        return f"http://{self.host}:{self.port}" if self.transfer and self.port else ""


SECTIONS = {"sender": SenderSettings}
