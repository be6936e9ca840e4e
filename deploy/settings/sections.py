"""The sections that belong to no room: the run itself, the model or what stands in for it, and the evaluation."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from producers.generation.engines.emulated.settings import LengthTraceSettings
from schemas.identifiers import is_plain_name
from schemas.profiles.decode import DecodeSettings
from schemas.profiles.training import TrainingCosts
from schemas.settings import Section


class RunSettings(Section):
    """``[run]``."""

    name: Annotated[str, Field(description="Prefix of the topics and name of the run's directory.")] = "run"
    directory: Annotated[Path, Field(description="Where runs keep their directories.")] = Path("runs")
    seed: Annotated[int, Field(ge=0, description="Seed of prompts, sampling and training.")] = 0
    workers: Annotated[int, Field(ge=0, le=256, description="Generation workers that `streamrl run` starts.")] = 2
    max_restarts: Annotated[int, Field(ge=0, description="Restarts of one process before the run gives up.")] = 5
    watchdog_s: Annotated[
        float, Field(gt=0, description="A process that makes no progress for so long ends, and is started anew.")
    ] = 120.0
    shutdown_grace_s: Annotated[float, Field(gt=0, description="Time to end cleanly after Ctrl-C or SIGTERM.")] = 20.0

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str) -> str:
        if not is_plain_name(name):
            raise ValueError(f"expected 1 to 64 of a-z, 0-9, '.', '_' and '-', got {name!r}")
        return name

    @property
    def path(self) -> Path:
        """The run's own directory."""
        return self.directory / self.name

    @property
    def weights_store(self) -> Path:
        """Where the trainer puts weight versions and the relay finds them."""
        return self.path / "weights"


class ModelSettings(Section):
    """``[model]``."""

    path: Annotated[
        str, Field(description="The policy to start from: a local HF directory or a hub id; needed unless emulated.")
    ] = ""


class EmulationSettings(Section):
    """``[emulation]``: in place of a model, for ``generation.engine`` and ``training.backend`` = "emulated"."""

    time_scale: Annotated[float, Field(gt=0, description="Emulated seconds in one second of the wall clock.")] = 100.0
    decode: DecodeSettings = DecodeSettings()
    lengths: LengthTraceSettings = LengthTraceSettings()
    training: TrainingCosts = TrainingCosts()


class EvaluationSettings(Section):
    """``[evaluation]``: judged before and after a run, never during it."""

    function: Annotated[
        str | None,
        Field(description="package.module:function (model directory, seed) -> {'metrics': {...}, 'samples': [...]}"),
    ] = None
