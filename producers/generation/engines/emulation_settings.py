"""``[emulation]``: the times and lengths that the emulated engine and the emulated trainer take."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from streamrl.producers.generation.engines.length_trace import LengthTraceSettings
from streamrl.schemas.profiles import DecodeSettings, DeviceProfile, TrainingCosts
from streamrl.schemas.settings import UNSET, Section


class EmulationSettings(Section):
    """``[emulation]``: replaces the model if ``generation.engine`` or ``training.backend`` is "emulated"."""

    time_scale: Annotated[float, Field(gt=0, description="Emulated seconds in one second of the wall clock.")] = 100.0
    profile: Annotated[
        Path | None,
        Field(description="Profile from `streamrl profile`, which sets emulation.decode and emulation.training."),
    ] = None
    decode: Annotated[
        DecodeSettings, Field(description="Seconds of decoding. Fields: see the emulation page, docs/emulation.md.")
    ] = DecodeSettings()
    lengths: Annotated[
        LengthTraceSettings,
        Field(description="Tokens of each completion. Fields: see the emulation page, docs/emulation.md."),
    ] = LengthTraceSettings()
    training: Annotated[
        TrainingCosts, Field(description="Seconds of training. Fields: see the emulation page, docs/emulation.md.")
    ] = TrainingCosts()

    @model_validator(mode="before")
    @classmethod
    def _profiled(cls, values: Any) -> Any:
        """Set the times of decoding and training from the profile, and refuse sections that set other times."""
        # Runs before the sections are validated, so values are as given: "unset" is still a word.
        if not isinstance(values, dict) or values.get("profile") in (None, UNSET):
            return values
        profile = DeviceProfile.read(Path(values["profile"]))
        for name, measured in (("decode", profile.decode), ("training", profile.training)):
            # Equal values are accepted, because the resolved settings of a run contain both.
            if name in values and type(measured).model_validate(values[name]) != measured:
                raise ValueError(
                    f"expected emulation.{name} to come from the profile {values['profile']}, "
                    f"got other values for it; leave out one of the two"
                )
        return values | {"decode": profile.decode, "training": profile.training}
