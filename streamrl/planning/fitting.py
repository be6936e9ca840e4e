"""Fits curves to measured points: least squares of the relative errors, with nonnegative coefficients.

Pure. Invariants: a_known_curve_is_recovered; more_work_never_takes_less_time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamrl.planning.measuring import DecodePoint, PrefillPoint, StepPoint
from streamrl.schemas.profiles import DecodeSettings, TrainingCosts

Matrix = NDArray[np.float64]
SHORTEST_S = 1e-9


@dataclass(frozen=True)
class Fitted:
    """One measurement and its fitted value, both in seconds."""

    what: str
    measured_s: float
    fitted_s: float

    @property
    def error(self) -> float:
        """Error of the fit, as a share of the measured value."""
        return self.fitted_s / self.measured_s - 1 if self.measured_s else 0.0


def fit_decode(points: Sequence[DecodePoint]) -> tuple[DecodeSettings, list[Fitted]]:
    """The decode curve, a table of (batch, seconds) and seconds per token of context; and each point with its fit.

    The coefficients are the table's increments from batch to batch, so that it never falls. The shape comes from
    medians, which single pauses do not change. The level comes from means, because a run has such pauses and takes
    their sum. Padding counts if that way of counting a context explains the points better.
    """
    batches = sorted({point.batch for point in points})
    seconds = np.array([point.seconds for point in points])
    candidates = []
    for padding_counts in (False, True):
        # t(b) = sum of increments up to b, so a point's row has a 1 for each batch up to its own: [points, batches+1].
        contexts = [float(point.padded if padding_counts else point.context) for point in points]
        rows = np.array(
            [
                [*(float(point.batch >= batch) for batch in batches), context]
                for point, context in zip(points, contexts, strict=True)
            ]
        )
        found = nonnegative(rows, seconds)
        candidates.append((float(((rows @ found / seconds - 1) ** 2).sum()), padding_counts, rows, found))
    _, padding_counts, rows, found = min(candidates, key=lambda candidate: candidate[:2])
    # The least-squares fit of relative errors is below a noisy mean by about its squared coefficient of variation, and
    # a median is below the mean by the pauses. So one factor for all points brings their fitted sum to the sum of their
    # means. A factor for each point would be as uncertain as the point's worst step, since it has only a few steps.
    found = found * (sum(point.mean_s for point in points) / float((rows @ found).sum()))
    levels = np.maximum(np.cumsum(found[:-1]), SHORTEST_S)
    decode = DecodeSettings(
        table=tuple((batch, float(value)) for batch, value in zip(batches, levels, strict=True)),
        context_s_per_token=float(found[-1]),
        padding_counts=padding_counts,
    )
    return decode, [
        Fitted(f"decode step, batch {point.batch}, context {point.context}", point.mean_s, float(value))
        for point, value in zip(points, rows @ found, strict=True)
    ]


def fit_prefill(points: Sequence[PrefillPoint]) -> tuple[float, float, list[Fitted]]:
    """Seconds per prompt, seconds per prompt token, and each point with its fit."""
    # A difference of two measurements may be zero; it has no relative error, so it is left out.
    usable = [point for point in points if point.seconds > 0]
    rows = np.array([[float(point.prompts), float(point.tokens)] for point in usable]).reshape(-1, 2)
    values = np.array([point.seconds for point in usable])
    per_prompt, per_token = map(float, nonnegative(rows, values)) if usable else (0.0, 0.0)
    return (
        per_prompt,
        per_token,
        [
            Fitted(
                f"prefill, {point.prompts} prompts, {point.tokens} tokens",
                point.seconds,
                per_prompt * point.prompts + per_token * point.tokens,
            )
            for point in usable
        ],
    )


def fit_training(points: Sequence[StepPoint]) -> tuple[TrainingCosts, list[Fitted]]:
    """Costs of micro-batches and of the optimizer, and each point with its fit."""
    rows = np.array([[point.tokens, point.squares, point.micro_batches, 1.0] for point in points])
    found = nonnegative(rows, np.array([point.seconds for point in points]))
    costs = TrainingCosts(
        forward_backward_s_per_token=float(found[0]),
        forward_backward_s_per_squared_token=float(found[1]),
        forward_backward_s_per_micro_batch=float(found[2]),
        optimizer_step_s=float(found[3]),
        padding_counts=True,
    )
    return costs, [
        Fitted(f"train step, {point.micro_batches} micro-batches, {point.tokens} tokens", point.seconds, float(value))
        for point, value in zip(points, rows @ found, strict=True)
    ]


def nonnegative(rows: Matrix, values: Matrix) -> Matrix:
    """Coefficients >= 0 with the least sum of squared relative errors (active sets; Lawson and Hanson, 1974).

    Args:
        rows: (points, coefficients), columns in any unit.
        values: (points), above 0.
    """
    # Each row is divided by its value, so that errors are relative; each column by its largest entry, so that squared
    # lengths and counts can share one tolerance.
    scale = np.maximum(np.abs(rows).max(axis=0), np.finfo(float).tiny)
    weighted, wanted = rows / scale / values[:, None], np.ones(len(values))
    found = np.zeros(rows.shape[1])
    passive = np.zeros(rows.shape[1], dtype=bool)
    for _ in range(30 * rows.shape[1]):
        # w = A^T (b - A x): if an entry is above 0, raising that coefficient from 0 reduces the error.
        slope = weighted.T @ (wanted - weighted @ found)
        if passive.all() or slope[~passive].max() <= 1e-10:
            break
        passive[np.argmax(np.where(passive, -np.inf, slope))] = True
        found = _feasible(weighted, wanted, found, passive)
    return np.asarray(found / scale, dtype=np.float64)


def _feasible(rows: Matrix, values: Matrix, found: Matrix, passive: NDArray[np.bool_]) -> Matrix:
    """The best coefficients of the passive columns; columns whose coefficient would be negative leave the set."""
    while True:
        best = np.zeros(len(found))
        best[passive] = np.linalg.lstsq(rows[:, passive], values, rcond=None)[0]
        wrong = passive & (best <= 0)
        if not wrong.any():
            return best
        # alpha = min x / (x - best) over the wrong ones: the largest step that leaves none below 0.
        step = np.min(found[wrong] / np.maximum(found[wrong] - best[wrong], 1e-300))
        found = found + step * (best - found)
        passive &= found > 1e-14
        if not passive.any():
            return np.zeros(len(found))
