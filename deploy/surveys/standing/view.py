"""A run's standing and its lags as text for people and as JSON for programs. Pure."""

from collections.abc import Iterator
from typing import Any

from deploy.surveys.standing.lags import GroupLag, PartitionLag
from deploy.surveys.standing.standing import Standing
from schemas.messages.reports import Heartbeat, WorkerState

WIDTHS = (11, 8, 11, 11, 9, 9, 9, 10)
"""Of the columns of a lag table."""


def status_lines(standing: Standing) -> Iterator[str]:
    """The run in a dozen lines."""
    state, metrics = standing.state, standing.metrics
    step = state.steps[-1].step if state.steps else standing.version.number
    yield f"run       {standing.run} at {standing.address}: {activity(standing)}"
    yield f"version   {standing.version}, announced {standing.orders.announced or 'none yet'}"
    since = f", {standing.at - state.steps[-1].sent_at:.0f} s ago" if state.steps else ""
    rate = f"{state.trajectories_per_s():.1f} trajectories/s"
    yield f"step      {step}{since}, reward {_figure(metrics.get('reward'))}, {rate}"
    mean, most = metrics.get("off_policy/mean"), metrics.get("off_policy/max")
    yield f"staleness {_figure(mean)} mean, {_figure(most)} max (optimizer steps)"
    groups = standing.trained_groups
    yield f"trained   {'-' if groups is None else f'{groups:,}'} groups, {int(metrics.get('num_tokens', 0)):,} tokens"
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in standing.skipped.items() if count)
    yield f"skipped   {skipped or 'none'}; {standing.dead_letters:,} dead letters"
    waiting = f"{unread(standing):,} trajectories not finished by trainers"
    yield f"in flight {standing.generating:,} completions at workers, {waiting}"
    for lag in standing.lags:
        buckets = "  ".join(f"{_bucket(bucket)} {count:,}" for bucket, count in lag.by_bucket().items())
        late = f"{_seconds(lag.behind_s)} behind  ({buckets})"
        yield f"lag       {lag.group or 'no consumer group yet'}: {lag.lag:,}, {late}"
    yield f"workers   {len(standing.workers)} heard of in the last minute"
    for beat in standing.workers.values():
        yield f"  {_worker(beat, standing)}"


def activity(standing: Standing) -> str:
    """What the run is doing, in a word or two."""
    if standing.orders.finished:
        return "finished"
    if standing.orders.mode != "run":
        return {"pause": "paused", "drain": "draining"}.get(standing.orders.mode, standing.orders.mode)
    return "running" if any(standing.is_alive(beat) for beat in standing.workers.values()) else "no worker alive"


def unread(standing: Standing) -> int:
    """Trajectories not finished by the consumer that is furthest behind."""
    return max((lag.lag for lag in standing.lags), default=0)


def _worker(beat: Heartbeat, standing: Standing) -> str:
    state = beat.state.value
    if beat.state is not WorkerState.STOPPED and not standing.is_alive(beat):
        state = f"silent for {standing.at - beat.sent_at:.0f} s"
    return (
        f"{beat.worker_id:<16} {state:<10} v{beat.version!s:<8} {beat.running:>4} running {beat.waiting:>4} waiting "
        f"of {beat.capacity:<4} {beat.tokens_per_s:>8.0f} tokens/s  {beat.engine}"
    )


def status_json(standing: Standing) -> dict[str, Any]:
    """The same, and all metrics of the newest step."""
    state = standing.state
    return {
        "run": standing.run,
        "bootstrap_servers": standing.address,
        "activity": activity(standing),
        "version": str(standing.version),
        "announced": None if standing.orders.announced is None else str(standing.orders.announced),
        "mode": standing.orders.mode,
        "finished": standing.orders.finished,
        "step": state.steps[-1].step if state.steps else standing.version.number,
        "step_age_s": standing.at - state.steps[-1].sent_at if state.steps else None,
        "trajectories_per_s": state.trajectories_per_s(),
        "trained_groups": standing.trained_groups,
        "skipped": standing.skipped,
        "dead_letters": standing.dead_letters,
        "in_flight": {"generating": standing.generating, "unread": unread(standing)},
        "lag": [lag_json(lag) for lag in standing.lags],
        "workers": [
            {**beat.model_dump(mode="json"), "version": str(beat.version), "alive": standing.is_alive(beat)}
            for beat in standing.workers.values()
        ],
        "metrics": dict(standing.metrics),
    }


def lag_lines(lag: GroupLag) -> Iterator[str]:
    """One group: its sum, then a line a partition."""
    name = lag.group or "no consumer group has committed offsets yet"
    yield f"{name}: lag {lag.lag:,}, {_seconds(lag.behind_s)} behind"
    yield _row("partition", "bucket", "next", "end", "lag", "in/s", "out/s", "behind")
    for each in lag.partitions:
        bucket = "-" if each.bucket is None else each.bucket
        rates = (_figure(each.produced_per_s), _figure(each.consumed_per_s))
        yield _row(each.partition, bucket, each.next_offset, each.end, each.lag, *rates, _seconds(each.behind_s))
    if lag.partitions and lag.partitions[0].bucket is not None:
        yield "  by bucket  " + "  ".join(f"{_bucket(bucket)} {count:,}" for bucket, count in lag.by_bucket().items())


def _row(*cells: object) -> str:
    return "".join(f"{cell!s:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))


def lag_json(lag: GroupLag) -> dict[str, Any]:
    """One group."""
    buckets = {str(bucket): count for bucket, count in lag.by_bucket().items() if bucket is not None}
    return {
        "group": lag.group,
        "lag": lag.lag,
        "behind_s": lag.behind_s,
        "by_bucket": buckets,
        "partitions": [_partition_json(each) for each in lag.partitions],
    }


def _partition_json(each: PartitionLag) -> dict[str, Any]:
    return {
        "partition": each.partition,
        "bucket": each.bucket,
        "next_offset": each.next_offset,
        "end": each.end,
        "lag": each.lag,
        "produced_per_s": each.produced_per_s,
        "consumed_per_s": each.consumed_per_s,
        "behind_s": each.behind_s,
    }


def _bucket(bucket: int | None) -> str:
    return "all buckets" if bucket is None else f"bucket {bucket}:"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
