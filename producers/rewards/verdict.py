"""Judges what a reward function returned or raised. Pure; never raises."""

import math
from typing import Any

MAX_REASON = 300
Verdict = tuple[float | None, str | None]
"""A reward, or none with the reason; none without a reason: the function does not apply to this completion."""


def of_returned(returned: Any) -> Verdict:
    """The reward in what a function returned for one completion: a list, tuple, array or tensor of one number."""
    try:
        values = returned.tolist() if hasattr(returned, "tolist") else returned
        if not isinstance(values, list | tuple):
            return None, f"expected a list of 1 reward, got {type(returned).__name__}"
        if len(values) != 1:
            return None, f"expected a list of 1 reward, got {len(values)}"
        return _of_value(values[0])
    except Exception as error:
        return of_raised(error)


def _of_value(value: Any) -> Verdict:
    if value is None:
        return None, None
    plain = value.item() if hasattr(value, "item") else value
    if not isinstance(plain, int | float):
        return None, f"expected a number or None, got {type(value).__name__}"
    try:
        number = float(plain)
    except OverflowError:
        number = math.inf
    return (number, None) if math.isfinite(number) else (None, f"expected a finite number, got {number}")


def of_raised(error: BaseException) -> Verdict:
    """One line that names what was raised."""
    try:
        text = " ".join(str(error)[: 4 * MAX_REASON].split())
    except Exception:
        text = ""
    name = type(error).__name__
    return None, (f"{name}: {text}" if text else name)[:MAX_REASON]


def timed_out(timeout_s: float) -> str:
    """The reason given to a completion whose call did not return in time."""
    return f"timed out after {timeout_s:g} s"
