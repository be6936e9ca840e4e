"""What `streamrl profile` measured on one kind of device, as a file; read by dispatch, plan and emulation.

All times are in seconds. A decode step of b completions that reads C tokens from their caches takes

    t(b) + c * C

and adds b to C, so that k steps in a row, with nobody coming or going, take

    k * t(b) + c * (k * C + b * k * (k - 1) / 2).

C is what the caches hold together; of an engine that pads (``padding_counts``), b times what the longest holds.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from streamrl.schemas.errors import SettingsError
from streamrl.schemas.settings import Section

Seconds = Annotated[float, Field(ge=0)]
TablePoint = tuple[Annotated[int, Field(ge=1)], Annotated[float, Field(gt=0)]]


class DecodeSettings(Section):
    """Measured or assumed, all in seconds: t(b) = step_s * (1 + b / batch_scale) unless there is a table."""

    step_s: Annotated[float, Field(gt=0, description="Seconds of a decode step, before what the batch adds.")] = 0.01
    batch_scale: Annotated[float, Field(gt=0, description="Running completions that double a decode step.")] = 64.0
    table: Annotated[
        tuple[TablePoint, ...],
        Field(
            description="In place of step_s and batch_scale: (batch size, seconds of a step), ascending; linear in "
            "between, as the first before them, along the last two after them."
        ),
    ] = ()
    context_s_per_token: Annotated[
        Seconds, Field(description="Seconds a step takes longer for each token in the batch's key-value cache.")
    ] = 0.0
    padding_counts: Annotated[
        bool, Field(description="A step reads each cache as if it were as long as the longest, as engines that pad do.")
    ] = False
    prefill_s: Annotated[
        Seconds, Field(description="Seconds for which each admitted prompt stalls the whole engine, however short.")
    ] = 0.0
    prefill_s_per_token: Annotated[
        Seconds, Field(description="Seconds for which a prompt token stalls the whole engine when it is admitted.")
    ] = 0.0
    adopt_s: Annotated[
        Seconds, Field(description="Seconds for which new weights stall the engine, between two decode steps.")
    ] = 0.0
    kv_tokens: Annotated[
        int | None,
        Field(
            ge=1, description="Tokens of context that the key-value cache holds, of all running completions together."
        ),
    ] = None
    chunk_tokens: Annotated[
        int, Field(ge=0, description="Tokens of a completion handed over at once; 0: all of them at its end.")
    ] = 0

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        batches = [batch for batch, _ in self.table]
        seconds = [value for _, value in self.table]
        # A larger batch never takes less: planning bisects for the largest one that keeps a time.
        if batches != sorted(set(batches)) or seconds != sorted(seconds):
            raise ValueError(f"expected a decode table with ascending batches and seconds, got {self.table}")
        return self


@dataclass(frozen=True)
class DecodeCurve:
    """t(b) and c as the settings describe them, see the top of the file."""

    settings: DecodeSettings

    @cached_property
    def _known(self) -> dict[int, float]:
        return {}

    def times(self, factor: float) -> "DecodeCurve":
        """The curve of a worker that takes so many times as long for everything."""
        decode = self.settings
        return DecodeCurve(
            decode.model_copy(
                update={
                    # Everything that is a time; ``batch_scale`` is a number of completions.
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
        # Kept, because plans ask for the same few batch sizes again and again.
        known = self._known.get(batch)
        if known is None:
            known = self._known[batch] = self._interpolated(batch) if self.settings.table else self._formula(batch)
        return known

    def leg_s(self, steps: int, batch: int, context: int) -> float:
        """Seconds of so many steps in a row with nobody coming or going; ``context``: tokens the first one reads."""
        # k * C + b * k * (k - 1) / 2: tokens in the caches, summed over the steps; an integer, so nothing is rounded.
        grown = steps * context + batch * (steps * (steps - 1) // 2)
        return steps * self.batch_s(batch) + self.settings.context_s_per_token * grown

    def steps_by(self, end: float, start: float, batch: int, context: int) -> int:
        """The most steps in a row, the first one begun at ``start``, whose last is over by ``end``."""
        seconds = end - start
        if seconds < 0:
            return 0
        # The k steps take slope * k + bend * k². The positive root of that in k, in the form that loses no digits where
        # bend is small or zero; then as many steps more or less as rounding was off, because callers compare times.
        bend = self.settings.context_s_per_token * batch / 2
        # With nearly empty caches ``bend`` may exceed the rest; the divisor below must stay positive all the same.
        slope = max(self.batch_s(batch) + self.settings.context_s_per_token * context - bend, 1e-12)
        steps = int(2 * seconds / (slope + math.sqrt(slope * slope + 4 * bend * seconds)))
        while start + self.leg_s(steps + 1, batch, context) <= end:
            steps += 1
        while steps and start + self.leg_s(steps, batch, context) > end:
            steps -= 1
        return steps

    def steps_until(self, end: float, start: float, batch: int, context: int) -> int:
        """The fewest steps in a row, the first one begun at ``start``, whose last is not over before ``end``."""
        steps = self.steps_by(end, start, batch, context)
        return steps if start + self.leg_s(steps, batch, context) >= end else steps + 1

    def kept_full_s(self, tokens: float, batch: int, context: float) -> float:
        """Seconds for so many tokens with so many running all the time; ``context``: mean tokens in each cache."""
        return tokens / batch * self.leg_s(1, batch, round(batch * context))

    def prefill_s(self, prompt_tokens: int) -> float:
        """Seconds for which the admission of a prompt stalls the engine."""
        return self.settings.prefill_s + self.settings.prefill_s_per_token * prompt_tokens

    def _formula(self, batch: int) -> float:
        return self.settings.step_s * (1 + batch / self.settings.batch_scale)

    def _interpolated(self, batch: int) -> float:
        table = self.settings.table
        if batch <= table[0][0] or len(table) == 1:
            return table[0][1]
        # Beyond the last point this stays the last one, so the line through the last two goes on.
        upper = min(bisect_left(table, batch, key=lambda point: point[0]), len(table) - 1)
        (before, low), (after, high) = table[upper - 1], table[upper]
        return low + (high - low) * (batch - before) / (after - before)


TYPICAL_CURVE = DecodeCurve(DecodeSettings())
"""Of a worker of which nothing is known."""


class TrainingCosts(Section):
    """Forward and backward cost per micro-batch, the other acts once each time; measured or assumed."""

    forward_backward_s_per_token: Annotated[
        Seconds, Field(description="Seconds for each token of prompts and completions in a micro-batch.")
    ] = 1e-5
    forward_backward_s_per_squared_token: Annotated[
        Seconds, Field(description="Seconds for each square of a sequence's length, as attention takes.")
    ] = 0.0
    forward_backward_s_per_micro_batch: Annotated[Seconds, Field(description="Seconds for each micro-batch.")] = 0.0
    padding_counts: Annotated[
        bool, Field(description="Padding costs what tokens cost; else only tokens do, as with variable lengths.")
    ] = False
    optimizer_step_s: Annotated[Seconds, Field(description="Seconds of one optimizer step.")] = 0.0
    export_s: Annotated[Seconds, Field(description="Seconds to put weights into the weights store.")] = 0.0
    checkpoint_s: Annotated[Seconds, Field(description="Seconds to write a checkpoint.")] = 0.0


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
        except FileNotFoundError as error:
            raise SettingsError(
                f"expected a profile, got {path}, which does not exist; `streamrl profile --out {path}` writes one"
            ) from error
        except (OSError, ValueError) as error:  # of what is not even text, and of what is another file
            raise SettingsError(f"expected a profile written by `streamrl profile` in {path}, got: {error}") from error
