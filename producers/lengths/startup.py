"""What a dispatcher does about lengths when it starts: build the predictor of the settings, and let it read the past.

The past is what the trajectories topic still holds; of a long one only the newest is read. Nothing here knows the
dispatcher, and groups that are fed to the predictor in another way are left to that.
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
"""Completions read over all partitions: as many as lie between two fits of the default settings."""
MAX_BYTES = 256 << 20
"""Trajectories of very long completions weigh megabytes; a start does not wait for more than this."""


OpenPredictor = Callable[[LengthSettings, LoopSettings, Buckets], LengthPredictor]


def build_predictor(
    settings: LengthSettings,
    loop: LoopSettings,
    length_of: SampleLength | None = None,
    others: Mapping[str, OpenPredictor] = MappingProxyType({}),
) -> LengthPredictor:
    """The predictor that the settings name. ``length_of``: the lengths of an emulated run, known in advance;
    ``others``: the predictors of optional features, by name.

    Raises:
        SettingsError: lengths of a run are asked for that is not emulated, or there is no such predictor.
    """
    buckets = build_buckets(settings, loop)
    match settings.predictor:
        case "constant":
            return ConstantLength(settings, loop, buckets)
        case "observed_quantiles":
            return ObservedQuantiles(settings, loop, buckets)
        case "trace":
            if length_of is None:
                raise SettingsError(
                    "expected generation.engine = 'emulated' with lengths.predictor = 'trace', got another"
                )
            return TraceLengths(loop, buckets, length_of, settings.trace_noise)
        case other if other in others:
            return others[other](settings, loop, buckets)
        case other:
            raise SettingsError(
                f"expected lengths.predictor to be one of this tree's, got {other!r}, whose feature is not there"
            )


def build_buckets(settings: LengthSettings, loop: LoopSettings) -> Buckets:
    """The boundaries of the settings, or ones that are fitted to what is observed."""
    if settings.buckets == "fixed":
        return Buckets(loop.bucket_boundaries)
    return Buckets(
        loop.bucket_boundaries,
        fit_every=settings.refit_every,
        fit_after=settings.min_samples,
        folder=settings.model_dir,
    )


@dataclass
class _History:
    """What was read, by trajectory; repeats count once. ``oldest``: by partition, the first record's time."""

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
    """Feed the predictor the newest completions, oldest first; returns how many. Advice only: a broken bus ends it.

    ``skip``: groups, by id, whose completions reach the predictor otherwise.
    """
    if not predictor.learns_from_the_past and not predictor.buckets.are_fitted:
        return 0
    try:
        completions = await _read(bus, TRAJECTORIES.full_name(run), skip)
    except StreamRLError as error:
        log.warning("lengths of the past not read", error=str(error))
        return 0
    for completion in completions:
        predictor.observe(completion)
    log.info("lengths of the past read", completions=len(completions))
    return len(completions)


async def _read(bus: Bus, topic: str, skip: Callable[[str], bool]) -> list[ObservedCompletion]:
    # Subscribed to only for its offsets: where to start reading can be given only when subscribing.
    subscription = await bus.subscribe([topic], client_id="length-replay", start="latest")
    try:
        first, ends = await subscription.beginning_offsets(), await subscription.end_offsets()
    finally:
        await subscription.close()
    # Every partition that holds anything gets an equal share of the records.
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
    # Partitions are length buckets. Where one was cut off, older records of the others would skew what is learned.
    cut = [history.oldest[tp.partition] for tp in start if start[tp] > first[tp] and tp.partition in history.oldest]
    horizon = max(cut, default=0.0)
    ordered = sorted((pair for pair in history.completions.values() if pair[0] >= horizon), key=lambda pair: pair[0])
    return [completion for _, completion in ordered]
