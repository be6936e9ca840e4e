"""A dispatcher's start-up of length prediction: build the predictor of the settings, and feed it earlier completions.

Earlier completions are those that the trajectories topic still holds; of a long topic only the newest are read. Groups
that reach the predictor in another way are skipped.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import structlog

from streamrl.bus.port import Bus, Record, message_of
from streamrl.producers.lengths.buckets import Buckets
from streamrl.producers.lengths.predictor import (
    ConstantLength,
    LengthPredictor,
    ObservedCompletion,
    ObservedQuantiles,
    SampleLength,
    TraceLengths,
)
from streamrl.producers.lengths.settings import LengthSettings
from streamrl.schemas.errors import SettingsError, StreamRLError
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import TRAJECTORIES
from streamrl.schemas.trajectories import FinishReason, Trajectory

log = structlog.get_logger()

MAX_RECORDS = 4096
"""Records read over all partitions: as many as completions between two fits."""
FIT_BUCKETS_EVERY = 4096
"""Completions between two fits of the bucket boundaries."""
MAX_BYTES = 256 << 20
"""Bytes after which reading stops, so that a start is fast: long trajectories have megabytes each."""


OpenPredictor = Callable[[LengthSettings, LoopSettings, Buckets], LengthPredictor]


def build_predictor(
    settings: LengthSettings,
    loop: LoopSettings,
    length_of: SampleLength | None = None,
    others: Mapping[str, OpenPredictor] = MappingProxyType({}),
    noise: float = 0.0,
) -> LengthPredictor:
    """The predictor that the settings name. ``length_of``: the lengths of an emulated run, known in advance;
    ``others``: the predictors of optional features, by name; ``noise``: see ``TraceLengths``.

    Raises:
        SettingsError: ``trace`` without an emulated run, or an unknown predictor.
    """
    buckets = build_buckets(settings, loop)
    match settings.predictor:
        case "constant":
            return ConstantLength(loop, buckets)
        case "observed_quantiles":
            return ObservedQuantiles(loop, buckets)
        case "trace":
            if length_of is None:
                raise SettingsError(
                    "expected generation.engine = 'emulated' with lengths.predictor = 'trace', got another engine"
                )
            return TraceLengths(loop, buckets, length_of, noise)
        case other if other in others:
            return others[other](settings, loop, buckets)
        case other:
            raise SettingsError(
                f"expected lengths.predictor to be available, got {other!r}, whose feature is not in this installation"
            )


def build_buckets(settings: LengthSettings, loop: LoopSettings) -> Buckets:
    """Buckets with the boundaries of the settings, or with boundaries that are fitted to observed lengths."""
    if settings.buckets == "fixed":
        return Buckets(loop.bucket_boundaries)
    return Buckets(loop.bucket_boundaries, fit_every=FIT_BUCKETS_EVERY, folder=settings.model_dir)


@dataclass
class _History:
    """The completions read, by trajectory; repeats count once. ``oldest``: by partition, the first record's time."""

    completions: dict[str, tuple[float, ObservedCompletion]] = field(default_factory=dict)
    oldest: dict[int, float] = field(default_factory=dict)
    bytes_read: int = 0

    def read(self, record: Record, skip: Callable[[str], bool]) -> None:
        # Kafka allows records without a value.
        self.bytes_read += len(record.value or b"")
        self.oldest.setdefault(record.partition, record.timestamp)
        message = message_of(record)
        if not isinstance(message, Trajectory) or message.finish_reason is FinishReason.ABORT:
            return
        if not skip(message.group_id):
            self.completions.setdefault(message.trajectory_id, (record.timestamp, ObservedCompletion.of(message)))


async def replay(bus: Bus, run: str, predictor: LengthPredictor, *, skip: Callable[[str], bool]) -> int:
    """Feed the predictor the newest completions, oldest first; returns how many. A bus error is logged, not raised.

    ``skip``: whether a group, by id, reaches the predictor in another way.
    """
    if not predictor.learns_from_the_past and not predictor.buckets.are_fitted:
        return 0
    try:
        completions = await _read(bus, TRAJECTORIES.full_name(run), skip)
    except StreamRLError as error:
        log.warning("earlier completions not read; length prediction starts without them", error=str(error))
        return 0
    for completion in completions:
        predictor.observe(completion)
    log.info("length predictor fed with earlier completions", completions=len(completions))
    return len(completions)


async def _read(bus: Bus, topic: str, skip: Callable[[str], bool]) -> list[ObservedCompletion]:
    # The first subscription only reads offsets: a start offset must be given when subscribing.
    subscription = await bus.subscribe([topic], client_id="length-replay", start="latest")
    try:
        first, ends = await subscription.beginning_offsets(), await subscription.end_offsets()
    finally:
        await subscription.close()
    # Every partition that is not empty gets an equal share of the records.
    each = max(1, MAX_RECORDS // max(1, sum(ends[tp] > first[tp] for tp in ends)))
    start = {tp: max(first[tp], ends[tp] - each) for tp in ends}
    history = _History()
    subscription = await bus.subscribe([topic], client_id="length-replay", start=start)
    try:
        while history.bytes_read < MAX_BYTES:
            positions = await subscription.positions()
            if all(position >= ends[tp] for tp, position in positions.items()):
                break
            for record in await subscription.poll(timeout_s=1.0):
                history.read(record, skip)
    finally:
        await subscription.close()
    # Partitions are length buckets. If one was cut off at a time, older records of the others would bias the lengths.
    cut = [history.oldest[tp.partition] for tp in start if start[tp] > first[tp] and tp.partition in history.oldest]
    horizon = max(cut, default=0.0)
    ordered = sorted((pair for pair in history.completions.values() if pair[0] >= horizon), key=lambda pair: pair[0])
    return [completion for _, completion in ordered]
