"""What a run's page starts with: one headline, six tiles, and a table of the model, data and settings. Pure.

Intervals cover 95 %. That of a share is E. B. Wilson's (Probable Inference, the Law of Succession, and Statistical
Inference, JASA 22, 1927), that of a difference R. G. Newcombe's tenth method (Interval Estimation for the Difference
between Independent Proportions, Statistics in Medicine 17, 1998). Each prompt counts once, however often it is sampled:
samples of one prompt depend on each other. Before and after count as independent, although they share their prompts, so
the interval of the difference is rather too wide than too narrow.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from streamrl.inspection.report.figures import Figure, figures_of, shown
from streamrl.inspection.report.record import RunRecord
from streamrl.observability.run_state.aggregates import end_windows, window_name
from streamrl.schemas.evaluation import HeldOut
from streamrl.settings.differences import ABSENT, PER_RUN_SETTINGS, value_text
from streamrl.settings.features import features

Z = 1.959964
"""Standard deviations to both sides of a normal distribution's mean that hold 95 % of it."""
MOST_CHANGES = 24
"""Most settings that differ from their defaults in the table; the settings below list all of them."""
IN_SETUP = ("model.path", "data.path", "data.dataset", "algorithm.name", "training.learning_rate")
"""Settings that have their own row in the table."""


class Headline(NamedTuple):
    """The result of a run in one line.

    ``notes``: the evidence for it. ``change`` is empty if there is nothing to compare with. ``better``: whether the
    change is one for the better; None: not certain.
    """

    what: str
    before: str
    after: str
    change: str
    notes: tuple[str, ...]
    better: bool | None = None


class Tile(NamedTuple):
    """One figure with its name, and what to compare it with."""

    label: str
    value: str
    note: str


class ChangedSetting(NamedTuple):
    """A setting, its value in the run, and its default, as text."""

    key: str
    value: str
    default: str


def held_out_of(record: RunRecord) -> HeldOut | None:
    """The held-out result of a run: that of a feature, else that of ``evaluation.function``; None without any."""
    evaluations, settings = record.rows.evaluations, record.settings
    shown_by = (feature.displays for feature in features() if feature.displays is not None)
    of_features = (displays.held_out(evaluations, settings) for displays in shown_by)
    return next((found for found in of_features if found is not None), None) or _by_function(record)


def _by_function(record: RunRecord) -> HeldOut | None:
    """The first of the metrics that the function returned, before and after training."""
    summary = record.summary
    for key, before in summary.items():
        name = key.removesuffix("_before")
        after = summary.get(f"{name}_after")
        if name != key and isinstance(before, int | float) and isinstance(after, int | float):
            prompts = summary.get("held_out_prompts")
            steps = 0, record.rows.steps[-1] if record.rows.steps else 0
            function = record.settings.get("evaluation.function")
            conditions = f"judged by {function}" if function else ""
            return HeldOut(
                name.replace("_", " "), before, after, steps, prompts if isinstance(prompts, int) else 0, conditions
            )
    return None


def headline_of(record: RunRecord) -> Headline:
    """The held-out result; without one the training reward, with words that say so."""
    held_out = held_out_of(record)
    return _training_reward(record) if held_out is None else _held_out_headline(held_out)


def _held_out_headline(found: HeldOut) -> Headline:
    what, (first, last) = f"held out: {found.measure}", found.steps
    if first == last:
        only = f"weights of step {last}, the only evaluated ones"
        return Headline(what, "", f"{found.after:.3f}", "", (only, found.measured_on))
    notes, better = [f"weights of step {first} and of step {last}; {found.measured_on}"], None
    if _has_intervals(found):
        one, other = wilson(found.before, found.prompts), wilson(found.after, found.prompts)
        low, high = difference_interval(found.before, found.after, found.prompts)
        better = None if low <= 0.0 <= high else found.after > found.before
        verdict = "; no certain change: the last one includes 0" if better is None else ""
        notes.insert(
            0,
            f"95 % intervals: before {one[0]:.3f} to {one[1]:.3f}, after {other[0]:.3f} to {other[1]:.3f}, "
            f"difference {low:+.3f} to {high:+.3f}{verdict}",
        )
    else:
        notes.insert(
            0, f"no intervals: {'the measure is no share' if found.prompts else 'the number of prompts is not known'}"
        )
    change = f"{found.after - found.before:+.3f}"
    return Headline(what, f"{found.before:.3f}", f"{found.after:.3f}", change, tuple(notes), better)


def _has_intervals(found: HeldOut) -> bool:
    return found.prompts > 0 and all(0.0 <= value <= 1.0 for value in (found.before, found.after))


def _training_reward(record: RunRecord) -> Headline:
    first, last = end_windows(record.rows.known("reward"))
    what, none = "training reward", "no held-out prompts were evaluated; [evaluation.data] names some"
    if not last:
        return Headline(what, "", ABSENT, "", ("the run recorded no reward", none))
    after = sum(last) / len(last)
    if not first:
        return Headline(what, "", f"{after:.3f}", "", (f"mean of {window_name('the last', len(last))}", none))
    before = sum(first) / len(first)
    steps = f"means of {window_name('the first', len(first))} and {window_name('the last', len(last))}"
    notes = (steps, f"of prompts that were trained: {none}")
    return Headline(what, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}", notes)


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share of ``count`` independent samples."""
    centre = share + Z * Z / (2 * count)
    half = Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    return max(0.0, (centre - half) / (1 + Z * Z / count)), min(1.0, (centre + half) / (1 + Z * Z / count))


def difference_interval(before: float, after: float, count: int) -> tuple[float, float]:
    """The 95 % interval of ``after - before``, each a share of ``count`` samples."""
    (low_before, high_before), (low_after, high_after) = wilson(before, count), wilson(after, count)
    down = math.hypot(after - low_after, high_before - before)
    up = math.hypot(high_after - after, before - low_before)
    return after - before - down, after - before + up


def tiles_of(record: RunRecord) -> tuple[Tile, ...]:
    """Six tiles, the same for every run: held out, reward, steps, speed, staleness, and skipped trajectories."""
    figures = {figure.key: figure for figure in figures_of(record)}
    return (
        _held_out_tile(held_out_of(record)),
        _reward_tile(record),
        _steps_tile(record, figures),
        Tile(
            "trajectories/s",
            _text(figures, "trajectories_per_s"),
            f"{_text(figures, 'tokens_per_s')} completion tokens/s, start-up excluded",
        ),
        _staleness_tile(record, figures),
        _skipped_tile(record, figures),
    )


def _held_out_tile(found: HeldOut | None) -> Tile:
    if found is None:
        return Tile("held out", "not measured", "no held-out prompts")
    change = f"{found.after - found.before:+.3f} against step {found.steps[0]}"
    return Tile(
        f"{found.measure}, held out", f"{found.after:.3f}", change if len(set(found.steps)) > 1 else "one evaluation"
    )


def _reward_tile(record: RunRecord) -> Tile:
    first, last = end_windows(record.rows.known("reward"))
    if not last:
        return Tile("reward", ABSENT, "none recorded")
    mean = sum(last) / len(last)
    note = f"{mean - sum(first) / len(first):+.3f} against {window_name('the first', len(first))}" if first else ""
    return Tile(f"reward, {window_name('last', len(last))}", f"{mean:.3f}", note)


def _steps_tile(record: RunRecord, figures: Mapping[str, Figure]) -> Tile:
    planned = record.settings.get("training.max_steps")
    of = f" of {planned:,}" if isinstance(planned, int) and planned != figures["steps"].value else ""
    return Tile("optimizer steps", f"{_text(figures, 'steps')}{of}", f"in {_text(figures, 'step_seconds')} of steps")


def _staleness_tile(record: RunRecord, figures: Mapping[str, Figure]) -> Tile:
    allowed = record.settings.get("loop.max_staleness")
    most = f"at most {_text(figures, 'staleness_max')}"
    return Tile(
        "staleness, mean steps", _text(figures, "staleness_mean"), most + (f", {allowed} allowed" if allowed else "")
    )


def _skipped_tile(record: RunRecord, figures: Mapping[str, Figure]) -> Tile:
    audit = record.summary.get("audit")
    lost = "not audited"
    if isinstance(audit, dict):
        lost = "audit: nothing lost" if audit.get("balanced") else "audit: NOT BALANCED"
    return Tile("skipped", _text(figures, "skipped_share"), f"{_text(figures, 'skipped')} trajectories; {lost}")


def _text(figures: Mapping[str, Figure], key: str) -> str:
    return shown(figures[key]) if key in figures else ABSENT


def setup_of(record: RunRecord) -> list[tuple[str, str]]:
    """Model, data, algorithm and learning rate of a run, each with its name; those that its settings name."""
    settings = record.settings
    rank, schedule = settings.get("training.lora.rank"), settings.get("training.lr_schedule")
    rate = settings.get("training.learning_rate")
    rows = [
        ("model", settings.get("model.path")),
        ("data", _data_of(settings)),
        ("algorithm", _joined([settings.get("algorithm.name"), f"LoRA of rank {rank}" if rank else None])),
        ("learning rate", _joined([None if rate is None else f"{rate:g}", schedule])),
    ]
    return [(name, str(value)) for name, value in rows if value]


def _data_of(settings: Mapping[str, Any]) -> str:
    mixture = sorted({key.split(".")[2] for key in settings if key.startswith("data.mixture.")})
    parts = [settings.get(f"data.{key}") for key in ("path", "dataset", "subset", "split")]
    return _joined([*parts, " + ".join(mixture) or None])


def _joined(parts: Sequence[object]) -> str:
    return ", ".join(str(part) for part in parts if part is not None)


def changed_settings(record: RunRecord) -> list[ChangedSetting]:
    """The settings of a run that differ from their defaults, without those that name it or have a row of their own."""
    from streamrl.settings.explaining import defaults  # the whole tree of settings

    known, found = defaults(), []
    for key, value in record.settings.items():
        default = known.get(key)
        if key in known and value_text(value) == value_text(default):
            continue
        if key not in PER_RUN_SETTINGS and key not in IN_SETUP:
            found.append(ChangedSetting(key, value_text(value), "none" if default is None else value_text(default)))
    return found
