"""The rows of `streamrl top` for several policies, below the workers: instances, and the arms of a split."""

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from streamrl.inspection.terminal.drawing import BAD, GOOD, MUTED, WARN, fitted, short
from streamrl.schemas.plain_text import plain_text


def policy_rows(data: Mapping[str, Any], name: int) -> list[Text]:
    """Rows for a snapshot's sections. ``name``: width of the names, in cells."""
    rows: list[Text] = []
    if instances := data.get("instances"):
        rows.append(Text(f"{'instance':{name}} {'weights':<18}{'reward':>7}{'age':>6}{'lag':>7}", MUTED))
        rows += [_instance(instance, name) for instance in instances]
    if arms := data.get("arms"):
        rows.append(Text(f"{'arm':{name}} {'share':<8}{'workers':<10}{'sampled':>7}{'reward':>8}", MUTED))
        rows += [_arm(arm, name) for arm in arms]
    return rows


def _arm(arm: Mapping[str, Any], name: int) -> Text:
    row = Text(no_wrap=True).append(fitted(plain_text(arm["name"]), name)).append(" ")
    workers = "others" if arm["workers"] is None else str(arm["workers"])
    row.append(fitted(f"{arm['share']:.3g}", 8)).append(fitted(workers, 10))
    row.append(fitted(short(arm["sampled"]), 7, right=True))
    reward = "-" if arm["reward"] is None else f"{arm['reward']:.3g}"
    return row.append(fitted(reward, 8, right=True), "bold")


def _instance(instance: Mapping[str, Any], name: int) -> Text:
    mode = instance["mode"]
    row = Text(no_wrap=True).append(fitted(plain_text(instance["name"]), name), GOOD if mode == "run" else WARN)
    row.append(" ").append(fitted(plain_text(instance["version"] or "no step yet"), 18))
    for value, cells in ((instance["reward"], 7), (instance["age"], 6), (instance["lag"], 7)):
        row.append(fitted("–" if value is None else short(value), cells, right=True))
    marks = [*(["served"] if instance["served"] else []), *([mode] if mode != "run" else [])]
    if instance["silent"]:
        return row.append(" served, silent", BAD)
    return row.append("".join(f" {mark}" for mark in marks), GOOD if mode == "run" else WARN)
