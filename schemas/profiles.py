"""The file of measurements that `streamrl profile` makes for one kind of device; dispatch, plan and emulation read it.

All times are in seconds. A decode step of b completions that reads C tokens from their caches takes

    t(b) + c * C

and adds b to C. So k consecutive steps, in which no completion starts or ends, take

    k * t(b) + c * (k * C + b * k * (k - 1) / 2).

C is the number of tokens in all caches together. For an engine that pads (``padding_counts``), C is b times the tokens
in the longest cache.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from streamrl.schemas.errors import SettingsError
from streamrl.schemas.settings import Section, SettingsTable

Seconds = Annotated[float, Field(ge=0)]
TablePoint = tuple[Annotated[int, Field(ge=1)], Annotated[float, Field(gt=0)]]


class DecodeSettings(SettingsTable):
    """Measured or assumed costs of decoding, in seconds. Without a table, t(b) = step_s * (1 + b / batch_scale)."""

    step_s: Annotated[float, Field(gt=0, description="Seconds of a decode step with an empty batch.")] = 0.01
    batch_scale: Annotated[
        float, Field(gt=0, description="Number of running completions that doubles the time of a decode step.")
    ] = 64.0
    table: Annotated[
        tuple[TablePoint, ...],
        Field(
            description="Replaces step_s and batch_scale: ascending pairs (batch size, seconds of a step). Linear "
            "between them; below the first, its value; above the last, on the line through the last two."
        ),
    ] = ()
    context_s_per_token: Annotated[
        Seconds, Field(description="Seconds that each token in the batch's key-value cache adds to a step.")
    ] = 0.0
    padding_counts: Annotated[
        bool, Field(description="A step reads every cache as if it were as long as the longest, as padding engines do.")
    ] = False
    prefill_s: Annotated[
        Seconds, Field(description="Seconds that admitting a prompt of any length stalls the whole engine.")
    ] = 0.0
    prefill_s_per_token: Annotated[
        Seconds, Field(description="Seconds that each token of an admitted prompt stalls the whole engine.")
    ] = 0.0
    adopt_s: Annotated[
        Seconds, Field(description="Seconds that adopting new weights stalls the engine, between two decode steps.")
    ] = 0.0
    kv_tokens: Annotated[
        int | None,
        Field(
            ge=1, description="Tokens of context that the key-value cache holds for all running completions together."
        ),
    ] = None
    chunk_tokens: Annotated[
        int, Field(ge=0, description="Tokens of a completion that the engine returns at once; 0: all at its end.")
    ] = 0

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        batches = [batch for batch, _ in self.table]
        seconds = [value for _, value in self.table]
        # A larger batch never takes less time: planning bisects for the largest one that stays within a time.
        if batches != sorted(set(batches)) or seconds != sorted(seconds):
            raise ValueError(f"expected a decode table with ascending batches and seconds, got {self.table}")
        return self


@dataclass(frozen=True)
class DecodeCurve:
    """t(b) and c by the settings; the module's docstring defines them."""

    settings: DecodeSettings

    @cached_property
    def _known(self) -> dict[int, float]:
        return {}

    def times(self, factor: float) -> "DecodeCurve":
        """The curve of a worker that takes ``factor`` times as long for everything."""
        decode = self.settings
        return DecodeCurve(
            decode.model_copy(
                update={
                    # All times. ``batch_scale`` is a number of completions and stays.
                    "step_s": decode.step_s * factor,
                    "table": tuple((batch, seconds * factor) for batch, seconds in decode.table),
                    "context_s_per_token": decode.context_s_per_token * factor,
                    "prefill_s": decode.prefill_s * factor,
                    "prefill_s_per_token": decode.prefill_s_per_token * factor,
                    "adopt_s": decode.adopt_s * factor,
                }
            )
        )

    def batch_s(self, batch: int) -> float:
        """t(b): a step's seconds with empty caches."""
        # Cached, because plans ask for the same few batch sizes again and again.
        known = self._known.get(batch)
        if known is None:
            known = self._known[batch] = self._interpolated(batch) if self.settings.table else self._formula(batch)
        return known

    def leg_s(self, steps: int, batch: int, context: int) -> float:
        """Seconds of consecutive steps in which no completion starts or ends.

        ``context``: tokens that the first step reads from the caches.
        """
        # k * C + b * k * (k - 1) / 2: tokens in the caches, summed over the steps. An integer, so nothing is rounded.
        grown = steps * context + batch * (steps * (steps - 1) // 2)
        return steps * self.batch_s(batch) + self.settings.context_s_per_token * grown

    def steps_by(self, end: float, start: float, batch: int, context: int) -> int:
        """The largest number of consecutive steps from ``start`` that are finished by ``end``."""
        seconds = end - start
        if seconds < 0:
            return 0
        # The k steps take slope * k + bend * k². ``steps`` is the positive root in k, in the form that loses no digits
        # when bend is small or zero. The loops then correct rounding, because callers compare times.
        bend = self.settings.context_s_per_token * batch / 2
        # With nearly empty caches ``bend`` may exceed the rest. The divisor below must stay positive even then.
        slope = max(self.batch_s(batch) + self.settings.context_s_per_token * context - bend, 1e-12)
        steps = int(2 * seconds / (slope + math.sqrt(slope * slope + 4 * bend * seconds)))
        while start + self.leg_s(steps + 1, batch, context) <= end:
            steps += 1
        while steps and start + self.leg_s(steps, batch, context) > end:
            steps -= 1
        return steps

    def steps_until(self, end: float, start: float, batch: int, context: int) -> int:
        """The smallest number of consecutive steps from ``start`` that are not finished before ``end``."""
        steps = self.steps_by(end, start, batch, context)
        return steps if start + self.leg_s(steps, batch, context) >= end else steps + 1

    def kept_full_s(self, tokens: float, batch: int, context: float) -> float:
        """Seconds to sample ``tokens`` with ``batch`` completions always running; ``context``: mean tokens a cache."""
        return tokens / batch * self.leg_s(1, batch, round(batch * context))

    def prefill_s(self, prompt_tokens: int) -> float:
        """Seconds that admitting a prompt stalls the engine."""
        return self.settings.prefill_s + self.settings.prefill_s_per_token * prompt_tokens

    def _formula(self, batch: int) -> float:
        return self.settings.step_s * (1 + batch / self.settings.batch_scale)

    def _interpolated(self, batch: int) -> float:
        table = self.settings.table
        if batch <= table[0][0] or len(table) == 1:
            return table[0][1]
        # Above the last point this stays the last index, so the line through the last two points continues.
        upper = min(bisect_left(table, batch, key=lambda point: point[0]), len(table) - 1)
        (before, low), (after, high) = table[upper - 1], table[upper]
        return low + (high - low) * (batch - before) / (after - before)


DEFAULT_CURVE = DecodeCurve(DecodeSettings())
"""Curve for a worker that was not measured."""


class TrainingCosts(SettingsTable):
    """Measured or assumed costs of training: forward and backward for each micro-batch, the others for each time."""

    forward_backward_s_per_token: Annotated[
        Seconds, Field(description="Seconds for each prompt or completion token in a micro-batch.")
    ] = 1e-5
    forward_backward_s_per_squared_token: Annotated[
        Seconds, Field(description="Seconds multiplied by the square of each sequence's length, for attention.")
    ] = 0.0
    forward_backward_s_per_micro_batch: Annotated[Seconds, Field(description="Seconds for each micro-batch.")] = 0.0
    padding_counts: Annotated[
        bool, Field(description="Padding costs as much as tokens; if false, nothing, as with variable lengths.")
    ] = False
    optimizer_step_s: Annotated[Seconds, Field(description="Seconds of one optimizer step.")] = 0.0
    export_s: Annotated[Seconds, Field(description="Seconds to export weights to the weights store.")] = 0.0
    checkpoint_s: Annotated[Seconds, Field(description="Seconds to write a checkpoint.")] = 0.0


class CoreCosts(SettingsTable):
    """A machine whose processes compute on its own cores, and what a run takes of them beside decoding and training."""

    number: Annotated[float, Field(gt=0, description="Cores that the run may use.")]
    full_speed: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="Speed of each process if as many compute as there are cores, relative to one that computes "
            "alone: cores share caches, memory and sometimes their arithmetic units.",
        ),
    ] = 1.0
    engine_cores: Annotated[float, Field(gt=0, description="Cores that a worker keeps busy while it decodes.")] = 1.0
    trainer_cores: Annotated[float, Field(gt=0, description="Cores that the trainer keeps busy at work.")] = 1.0
    cpu_s_per_trajectory: Annotated[
        Seconds, Field(description="Seconds of a core that broker, dispatcher and all others spend on a trajectory.")
    ] = 0.0
    worker_s_per_trajectory: Annotated[
        Seconds,
        Field(
            description="Seconds that a worker itself spends on a trajectory, while its engine waits; 0 if the engine "
            "computes in another process."
        ),
    ] = 0.0
    cores_per_run: Annotated[
        float, Field(ge=0, description="Cores that they keep busy at all times, whatever the run does.")
    ] = 0.0

    def share(self, share: float) -> "CoreCosts":
        """The costs of a part of the run on the same part of the cores."""
        return self.model_copy(update={"number": self.number * share, "cores_per_run": self.cores_per_run * share})

    def speed(self, demand: float) -> float:
        """The speed of each process, relative to one that computes alone, if all together could use ``demand`` cores.

        It falls evenly from 1 for one core to ``full_speed`` for all of them. Beyond that they take turns.
        """
        if demand >= self.number:
            return min(1.0, self.full_speed * self.number / demand)
        if demand <= 1:
            return 1.0
        return 1 - (1 - self.full_speed) * (demand - 1) / (self.number - 1)


class DeviceProfile(Section):
    """Times of one generation worker and one trainer on one kind of hardware, for one model. All are in seconds."""

    device: Annotated[str, Field(description="The hardware, in words.")]
    model: Annotated[str, Field(description="The measured model.")]
    engine: Annotated[str, Field(description="The engine that sampled.")]
    max_num_seqs: Annotated[int, Field(ge=1, description="Largest measured batch, in completions.")]
    decode: DecodeSettings
    training: TrainingCosts
    cores: Annotated[
        CoreCosts | None, Field(description="The cores that engine and trainer share; none if they use GPUs.")
    ] = None
    weight_transfer_s: Annotated[
        float, Field(ge=0, description="Seconds from complete weights in the store to a worker that samples with them.")
    ] = 0.0
    created_at: Annotated[float, Field(description="Time of the measurement in seconds since the epoch.")] = 0.0
    versions: Annotated[dict[str, str], Field(description="Versions of the measured libraries, by name.")] = {}

    def write(self, path: Path) -> None:
        """Write the profile as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.model_dump_json(indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """The profile in a file that ``write`` made.

        Raises:
            SettingsError: there is no such file, or it is not a profile.
        """
        try:
            return cls.model_validate_json(path.read_text())
        except FileNotFoundError as error:
            raise SettingsError(
                f"expected a profile at {path}, which does not exist; `streamrl profile --out {path}` writes one"
            ) from error
        except (OSError, ValueError) as error:  # ValueError: the file is not text, or is not a profile
            raise SettingsError(f"expected a profile written by `streamrl profile` in {path}, got: {error}") from error
