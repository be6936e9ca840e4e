"""What `streamrl profile` measured on one kind of device, as a file; read by dispatch, plan and emulation."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError

from schemas.errors import SettingsError
from schemas.profiles.decode import DecodeSettings
from schemas.profiles.training import TrainingCosts
from schemas.settings import Section


class DeviceProfile(Section):
    """Times of one generation worker and of one trainer on the named hardware, for one model. All in seconds."""

    device: Annotated[str, Field(description="The hardware, in words.")]
    model: Annotated[str, Field(description="What was measured.")]
    engine: Annotated[str, Field(description="What sampled.")]
    max_num_seqs: Annotated[int, Field(ge=1, description="Largest batch that was measured.")]
    decode: DecodeSettings
    training: TrainingCosts
    weight_transfer_s: Annotated[
        float, Field(ge=0, description="From finished weights in the store to a worker that samples with them.")
    ] = 0.0
    created_at: Annotated[float, Field(description="Seconds since the epoch.")] = 0.0
    versions: Annotated[dict[str, str], Field(description="Of the libraries that were measured.")] = {}

    def write(self, path: Path) -> None:
        """Keep it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.model_dump_json(indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """What ``write`` kept.

        Raises:
            SettingsError: there is no such file, or it is not a profile.
        """
        try:
            return cls.model_validate_json(path.read_text())
        except (OSError, ValidationError) as error:
            raise SettingsError(f"expected a profile written by `streamrl profile` in {path}, got: {error}") from error
