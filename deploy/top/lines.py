"""A run's present as one line of text or one JSON object, for whatever is not a terminal. Pure."""

from collections.abc import Sequence
from typing import Any

from deploy.live.snapshot import snapshot
from deploy.live.state import LiveState
from deploy.top.drawing.blocks import plain, short

TOLD = ("loop", "lag", "workers", "split", "staleness", "lengths")


def line_of(state: LiveState, now: float) -> str:
    """Health, step, reward, rates, staleness, lag per bucket, weights per worker."""
    found = snapshot(state, now)
    loop, lag = found["loop"], found["lag"]
    rates, metrics = loop["rates"], loop["metrics"]
    waiting = zip(lag["buckets"], lag["unfinished"], lag["unread"], strict=True)
    behind = " ".join(f"b{bucket}:{unread if done is None else done}" for bucket, done, unread in waiting)
    held = " ".join(f"{plain(each['id'])}@{each['version']}" for each in found["workers"] if each["state"] != "stopped")
    skips = " ".join(f"{reason}:{count}" for reason, count in sorted(loop["skips"].items()))
    parts = (
        f"{plain(state.run)} {loop['health']}",
        f"step {loop['step']}",
        f"reward {short(metrics.get('reward'))}",
        f"{short(rates['trajectories'])} traj/s",
        f"{short(rates['tokens'])} tok/s",
        f"trained {short(rates['trained'])}/s",
        f"staleness {short(metrics.get('off_policy/mean'))} (max {short(metrics.get('off_policy/max'))})",
        f"lag {behind or '-'}",
        f"workers {held or '-'}",
        *([f"skipped {skips}"] if skips else []),
    )
    return "  ".join(parts)


def object_of(state: LiveState, now: float, told: int) -> dict[str, Any]:
    """The same and more as plain data; ``told``: the number of the last event that was printed before."""
    found = snapshot(state, now)
    return {
        "at": round(now, 3),
        "run": state.run,
        **{name: found[name] for name in TOLD},
        "events": newest_events(found["events"], told),
    }


def newest_events(events: Sequence[Sequence[Any]], after: int) -> list[dict[str, Any]]:
    """Events with a higher number."""
    names = ("number", "at", "level", "text", "times")
    return [dict(zip(names, event, strict=True)) for event in events if event[0] > after]
