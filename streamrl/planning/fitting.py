"""Curves through measured points, by least squares of the relative errors with coefficients that are not negative.

Pure. Invariants: a_measured_curve_is_found_again; more_work_never_takes_less_time.
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
    """One measurement beside what the fit says, both in seconds."""

    what: str
    measured_s: float
    fitted_s: float

    @property
    def error(self) -> float:
        """Of the fit, as a share of what was measured."""
        return self.fitted_s / self.measured_s - 1 if self.measured_s else 0.0


def fit_decode(points: Sequence[DecodePoint]) -> tuple[DecodeSettings, list[Fitted]]:
    """Table of (batch, seconds) and seconds per token of context, and each point beside them.

    The table's rises from batch to batch are the coefficients, so that it cannot fall. The shape comes from medians,
    which one hiccup leaves alone; the level from means, because a run has its hiccups and what it takes is a sum.
    Whether padding counts follows from which of the two ways of counting a context explains the points better.
    """
    batches = sorted({point.batch for point in points})
    seconds = np.array([point.seconds for point in points])
    ways = []
    for padding_counts in (False, True):
        # t(b) = sum of rises up to b, so a point's row has a 1 for each batch up to its own: [points, batches + 1].
        read = [float(point.padded if padding_counts else point.context) for point in points]
        rows = np.array(
            [
                [*(float(point.batch >= batch) for batch in batches), own]
                for point, own in zip(points, read, strict=True)
            ]
        )
        found = nonnegative(rows, seconds)
        ways.append((float(((rows @ found / seconds - 1) ** 2).sum()), padding_counts, rows, found))
    _, padding_counts, rows, found = min(ways, key=lambda way: way[:2])
    # Least squares of relative errors lies below a noisy mean by about its squared coefficient of variation, and a
    # median below it by the hiccups. One factor for all points brings their fitted sum to the sum of their means: of a
    # single one's few steps, the mean would be as uncertain as its worst step.
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
    """Seconds per prompt, seconds per prompt token, and each point beside them."""
    # A difference of two measurements may come out as nothing; it has no relative error.
    told = [point for point in points if point.seconds > 0]
    rows = np.array([[float(point.prompts), float(point.tokens)] for point in told]).reshape(-1, 2)
    each, per_token = map(float, nonnegative(rows, np.array([point.seconds for point in told]))) if told else (0.0, 0.0)
    return (
        each,
        per_token,
        [
            Fitted(
                f"prefill, {point.prompts} prompts, {point.tokens} tokens",
                point.seconds,
                each * point.prompts + per_token * point.tokens,
            )
            for point in told
        ],
    )


def fit_training(points: Sequence[StepPoint]) -> tuple[TrainingCosts, list[Fitted]]:
    """Costs of micro-batches and of the optimizer, and each point beside them."""
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
        # w = A^T (b - A x): where it is above 0, a coefficient that is 0 so far would help if it grew.
        slope = weighted.T @ (wanted - weighted @ found)
        if passive.all() or slope[~passive].max() <= 1e-10:
            break
        passive[np.argmax(np.where(passive, -np.inf, slope))] = True
        found = _feasible(weighted, wanted, found, passive)
    return np.asarray(found / scale, dtype=np.float64)


def _feasible(rows: Matrix, values: Matrix, found: Matrix, passive: NDArray[np.bool_]) -> Matrix:
    """The best coefficients of the passive columns; those that would be negative leave the set on the way there."""
    while True:
        best = np.zeros(len(found))
        best[passive] = np.linalg.lstsq(rows[:, passive], values, rcond=None)[0]
        wrong = passive & (best <= 0)
        if not wrong.any():
            return best
        # alpha = min x / (x - best) over those: as far as one can go with none below 0.
        step = np.min(found[wrong] / np.maximum(found[wrong] - best[wrong], 1e-300))
        found = found + step * (best - found)
        passive &= found > 1e-14
        if not passive.any():
            return np.zeros(len(found))
