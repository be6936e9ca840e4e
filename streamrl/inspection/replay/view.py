"""Shows replays as lines of text, and any result as JSON. Pure."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from streamrl.inspection.replay.steps import StepLog, describe_attempts
from streamrl.schemas.plain_text import plain_json

if TYPE_CHECKING:  # these modules import torch, which `streamrl ui` and `show` do not need
    from streamrl.inspection.replay.comparing import TrajectoryContribution
    from streamrl.inspection.replay.dead_letters import ReplayedDeadLetter
    from streamrl.inspection.replay.results import BisectionResult, GradientOutlier, RebuiltStep, StepReplay, WhatIf

LARGEST = 12
"""Rows of a ranking that are printed. ``--json`` has all of them."""
TEXT = 400
"""Characters of a prompt or completion that are printed."""


def overview(log: StepLog, checkpoints: Sequence[str]) -> list[str]:
    """Lines that list the steps and checkpoints that can be replayed."""
    lines = ["the surviving chain:", *(f"  {segment}" for segment in log.chain())]
    undone = sorted(version for version in log.reports if not log.counts(version))
    if undone:
        lines += ["undone by crashes (replay with --lineage):", f"  {', '.join(map(str, undone))}"]
    for step in sorted({refused.step for refused in log.refused}):
        attempts = [refused for refused in log.refused if refused.step == step]
        lines.append(f"step {step} was refused: {describe_attempts(attempts)}")
    return [*lines, f"checkpoints: {', '.join(checkpoints) or 'none'}"]


def replay_lines(found: "StepReplay", run: str) -> list[str]:
    """Lines that show one step in full."""
    rebuilt = found.rebuilt
    lines = [*_head(rebuilt), "", *_metrics(rebuilt), "", *_gradients(rebuilt)]
    if rebuilt.rows:
        lines += ["", *row_lines(rebuilt.rows)]
    if rebuilt.left_out:
        lines += ["", "counted for the advantages, not trained:"]
        lines += [f"  {name}: {why}" for name, why in rebuilt.left_out]
    if found.what_if is not None:
        lines += ["", *_what_if(found.what_if)]
    return [*lines, "", f"look at one of them: streamrl show TRAJECTORY --run {run}"]


def step_line(found: "StepReplay") -> str:
    """One step in one line."""
    rebuilt = found.rebuilt
    loss, norm = rebuilt.metric("loss"), rebuilt.metric("grad_norm")
    line = (
        f"step {rebuilt.step} ({rebuilt.version})  {rebuilt.verdict}"
        f"  loss {number(loss.rebuilt)} ({_against(loss.recorded, loss.equal)})"
        f"  grad norm {number(norm.rebuilt)} ({_against(norm.recorded, norm.equal)})"
    )
    if found.what_if is None:
        return line
    # Pairs are (original, what-if), and the line already has the original.
    update, metrics = found.what_if.update, found.what_if.metrics
    changed = f"  what-if: loss {number(metrics['loss'][1])}  grad norm {number(metrics['grad_norm'][1])}"
    return line + changed + (f"  cosine {number(update.cosine)}" if update else f"  {found.what_if.problem}")


def _against(recorded: float | None, equal: bool) -> str:
    return "equal" if equal else f"recorded {number(recorded)}"


def _head(rebuilt: "RebuiltStep") -> list[str]:
    what = "refused attempt at step" if rebuilt.refused else "step"
    lines = [
        f"{what} {rebuilt.step} ({rebuilt.version}), from {rebuilt.start} over {rebuilt.steps_between} steps: "
        f"{rebuilt.verdict}"
    ]
    if rebuilt.differing_between:
        lines.append(f"  earlier steps that differ: {', '.join(map(str, rebuilt.differing_between))}")
    if rebuilt.problem or rebuilt.recorded_problem:
        lines.append(
            f"  problem in the replay: {rebuilt.problem or 'none, the step was applied'} "
            f"(recorded: {rebuilt.recorded_problem or 'applied'})"
        )
    if rebuilt.verdict == "not recorded":
        lines.append("  all recorded metrics are equal; no digests and no copy of these weights are left to compare")
    equal = [tensor for tensor in rebuilt.tensors if tensor.equal]
    if rebuilt.tensors:
        lines.append(f"  {len(equal)} of {len(rebuilt.tensors)} tensors bit-equal")
    differing = [tensor for tensor in rebuilt.tensors if not tensor.equal]
    lines += [
        f"  differs: {tensor.name}, largest difference {number(tensor.max_abs_difference)}" for tensor in differing
    ]
    return lines


def _metrics(rebuilt: "RebuiltStep") -> list[str]:
    # Nine significant digits distinguish any two float32 numbers; six do not.
    rows = [
        (pair.name, number(pair.recorded, 9), number(pair.rebuilt, 9), "" if pair.equal else "differs")
        for pair in rebuilt.metrics
    ]
    return columns(("metric", "recorded", "rebuilt", ""), rows)


def _gradients(rebuilt: "RebuiltStep") -> list[str]:
    ranked = sorted(
        rebuilt.gradient_norms.items(), key=lambda item: -item[1] if item[1] == item[1] else -1e300
    )  # NaN first
    rows = [(name, number(norm)) for name, norm in ranked[:LARGEST]]
    if len(ranked) > LARGEST:
        rows.append((f"… {len(ranked) - LARGEST} more (--json lists all)", ""))
    return columns(("gradient", "norm"), rows)


def row_lines(rows: "Sequence[TrajectoryContribution]") -> list[str]:
    """Lines of the table of trajectories."""
    with_norms = any(row.gradient_norm is not None for row in rows)
    head = ["trajectory", "at", "reward", "advantage", "tokens", "loss", "ratio", "max ratio", "staleness"]
    cells = [
        [
            row.trajectory_id,
            f"{row.partition}@{row.offset}",
            number(row.reward, 4),
            number(row.advantage, 4),
            str(row.tokens),
            number(row.loss, 4),
            number(row.ratio_mean, 4),
            number(row.ratio_max, 4),
            str(row.staleness),
            *([number(row.gradient_norm, 4)] if with_norms else []),
        ]
        for row in rows
    ]
    return columns([*head, *(["own grad norm"] if with_norms else [])], cells, left=2)


def _what_if(found: "WhatIf") -> list[str]:
    rows = [(name, number(one), number(two)) for name, (one, two) in sorted(found.metrics.items())]
    update = found.update
    if update is not None:
        rows.append(("update norm", number(update.original), number(update.what_if)))
    lines = [f"what if: {', '.join(found.changes)}", *columns(("metric", "original", "what-if"), rows)]
    if update is None:
        return [*lines, f"not compared, because a step was not applied: {found.problem or 'the original'}"]
    groups = [(g.group, number(g.original), number(g.what_if), number(g.cosine)) for g in update.groups]
    groups.append(("all", number(update.original), number(update.what_if), number(update.cosine)))
    movers = [(m.name, number(m.difference), number(m.original), number(m.what_if)) for m in update.movers]
    lines += ["", *columns(("update norm of", "original", "what-if", "cosine"), groups)]
    lines += ["", *columns(("largest differences", "difference", "original", "what-if"), movers)]
    return lines + (["", "rows of the what-if:", *row_lines(found.rows)] if found.rows else [])


def bisection_lines(found: "BisectionResult", run: str) -> list[str]:
    """Lines with the culprits, and all rows by their share."""
    why = "given" if found.median is None else f"10 × the median {number(found.median)} of the 20 steps before"
    head = f"step {found.step}: grad norm {number(found.gradient_norm)}, limit {number(found.threshold)} ({why})"
    if not found.culprits:
        lines = [head, "nothing to find: the gradient is within the limit"]
    else:
        count = sum(len(culprit) for culprit in found.culprits)
        lines = [head, f"{count} culprit(s), found with {found.computed} gradients:"]
        seen: set[str] = set()
        for culprit in found.culprits:
            lines += ["", *(line for outlier in culprit for line in _outlier_lines(outlier, run, seen))]
            # After the culprit's own lines: for them, only groups of larger culprits count.
            seen |= {outlier.group_id for outlier in culprit}
        lines += ["", f"grad norm without them: {number(found.without_culprits)}"]
    return [*lines, "", "by own gradient norm:", *row_lines(found.ranking[:LARGEST])]


def _outlier_lines(outlier: "GradientOutlier", run: str, seen: set[str]) -> list[str]:
    """``seen``: groups of larger culprits."""
    row = outlier.row
    sibling = ["    its group has a larger culprit above, whose reward its advantage depends on"]
    return [
        f"  {row.trajectory_id} at {row.partition}@{row.offset}: own grad norm {number(row.gradient_norm)}, "
        f"reward {number(row.reward)}, advantage {number(row.advantage)}, max ratio {number(row.ratio_max)}",
        *(sibling if outlier.group_id in seen else []),
        f"    prompt:     {_short(outlier.prompt)}",
        f"    completion: {_short(outlier.completion)}",
        f"    streamrl show {row.trajectory_id} --run {run}",
    ]


def _short(text: str) -> str:
    # ``repr`` keeps the text on one line, and shows where it ends.
    return repr(text if len(text) <= TEXT else f"{text[:TEXT]}…")


def dead_letter_lines(version: str, dead_letters: "Sequence[ReplayedDeadLetter]") -> list[str]:
    """Lines that show the dead letters and their contributions."""
    usable = [dead_letter for dead_letter in dead_letters if dead_letter.row is not None]
    lines = [f"{len(dead_letters)} dead letters, {len(usable)} of them usable now; weights {version}"]
    for dead_letter in dead_letters:
        lines.append(f"{dead_letter.origin}: was refused with: {dead_letter.first_error}")
        if dead_letter.row is None:
            lines.append(f"  still not usable: {dead_letter.problem}")
    rows = [dead_letter.row for dead_letter in usable if dead_letter.row is not None]
    return lines + (["", *row_lines(rows)] if rows else [])


def as_json(value: Any) -> str:
    """A value as JSON text. Numbers that are not finite become the strings ``inf``, ``-inf`` and ``nan``."""
    # Prompts and completions keep their own script. Only control characters of terminals are escaped.
    return plain_json(json.dumps(plain(value), ensure_ascii=False))


def plain(value: Any) -> Any:
    """Dataclasses (with their ``verdict``, if they have one) and messages as plain values."""
    # ``is_dataclass`` is also true of a class.
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return fields | ({"verdict": value.verdict} if hasattr(value, "verdict") else {})
    if isinstance(value, BaseModel):
        return plain(value.__dict__)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    # JSON has no such numbers. ``json.dumps`` would write NaN and Infinity, which other parsers refuse.
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # numpy's arrays and scalars. The result may contain NaN, so it is converted again.
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    # Before sequences, because a str is one too. ``str`` turns an enum's member into plain text.
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Sequence | set | frozenset):
        return [plain(item) for item in value]
    return value


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines of a table: the first ``left`` columns are aligned to the left, the others to the right."""
    widths = [max(len(row[number]) for row in [head, *rows]) for number in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return [line(row) for row in (head, *rows)]


def number(value: float | None, digits: int = 6) -> str:
    """A number as text; ``-`` if there is none."""
    return "-" if value is None else f"{value:.{digits}g}"
