"""Fits what no paper says: on the 7B and 32B rows of Laminar's figure 11, and StreamRL's 5K and 20K rows of figure 8.

Each term has several forms; the one with which rows that were left out are predicted best is taken (leave one
configuration out, mean absolute error of the logarithm), a form with one parameter more only if it is better by
``WORTH``. Stages are simulated (``stages``), their composition is a formula here: a step takes what its slowest stage
takes where they overlap, and their sum where they do not. The rows of the results are then simulated whole.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks.simulation.papers import LAMINAR, STREAMRL, SYSTEMS, LaminarRow, StreamRow
from benchmarks.simulation.parameters import STREAMRL_SYSTEMS, laminar, streamrl

WORTH = 0.003
Values = dict[str, float]
Form = Mapping[str, float]
"""Parameters of a form, with where their search begins."""
LAMINAR_TERMS: dict[str, dict[str, Form]] = {
    "training": {
        "cost / G": {},
        "cost / G^q": {"train_scaling": 0.9},
        "cost / G + seconds a step": {"train_s_per_step": 50.0},
        "cost / G + seconds a token": {"train_serial_s_per_token": 2e-6},
    },
    "control": {
        "none": {},
        "in training, seconds a token": {"control_in_training_s_per_token": 5e-6},
        "a stage, seconds a token": {"control_s_per_token": 1.4e-5},
    },
    "decoding of verl": {
        "as measured": {},
        "times a factor": {"decode_factor_verl": 1.3},
        "seconds a step": {"decode_extra_s_verl": 0.005},
    },
    "decoding of Laminar": {"as measured": {}, "times a factor": {"decode_factor_laminar": 1.1}},
    "partial rollout": {
        "as Laminar": {},
        "decoding times a factor": {"decode_factor_areal": 1.5},
        "seconds a step": {"areal_s_per_step": 60.0},
    },
}
STREAMRL_TERMS: dict[str, dict[str, Form]] = {
    "training": {
        "cost / G": {},
        "cost / G^q": {"train_scaling": 1.1},
        "cost / G + seconds a step": {"train_s_per_step": 5.0},
    },
    "decoding": {"as measured": {}, "times a factor": {"decode_factor_own": 1.3}},
    "verl decoding": {"as ColocationRL": {}, "times a factor": {"decode_factor_verl": 2.0}},
    "verl training": {"as ColocationRL": {}, "times a factor": {"train_factor_verl": 1.5}},
    "switching": {"none": {}, "seconds a step": {"switch_s": 10.0}},
}
ALWAYS = {
    "laminar": {"train_gpu_s_per_token": 2e-4, "train_exponent": 0.9},
    "streamrl": {"train_gpu_s_per_token": 4e-4, "train_exponent": 0.9},
}


@dataclass(frozen=True)
class Observation:
    """A published figure; ``fold``: the configuration that is left out together; ``predict``: by these values."""

    name: str
    fold: str
    published: float
    predict: Callable[[Values], float]


def laminar_observations(stages: Sequence[Mapping[str, Any]]) -> list[Observation]:
    """Tokens a second."""
    by_name = {(stage["model"], stage["gpus"], stage["system"]): stage for stage in stages}
    found = []
    for row in LAMINAR:
        for name, published in zip(SYSTEMS, row.published, strict=False):
            stage = by_name[row.model, row.gpus, "one_step" if name == "stream" else name]

            def predict(values: Values, row=row, name=name, stage=stage) -> float:
                return _laminar_rate(row, name, stage, values)

            found.append(Observation(f"{row.model} {row.gpus} {name}", f"{row.model} {row.gpus}", published, predict))
    return found


def _laminar_rate(row: LaminarRow, name: str, stage: Mapping[str, Any], values: Values) -> float:
    plant, work, _ = laminar(row, name, with_followers(values))
    train_s = work.tokens * plant.train_s_per_token + plant.train_s_per_step + plant.stall_s
    factor = plant.curve.settings.step_s
    kind = "areal" if name == "areal" else "laminar" if name == "laminar" else "verl"
    factor = with_followers(values).get(f"decode_factor_{kind}", 1.0)
    if "rate" in stage:
        return 1e-3 * min(stage["rate"] / factor, work.tokens / train_s)
    generation_s = factor * (stage["batch_s"] + values.get("decode_extra_s_verl", 0.0) * stage["steps"])
    control_s = work.tokens * plant.control_s_per_token
    if name == "verl":
        return 1e-3 * work.tokens / (max(generation_s, control_s) + train_s)
    return 1e-3 * work.tokens / (max(generation_s, control_s, train_s) + plant.sync_s)


def with_followers(values: Values) -> Values:
    """With what follows from them: partial rollout decodes as Laminar does unless it has a factor of its own."""
    found = dict(values)
    if "decode_factor_laminar" in found:
        found.setdefault("decode_factor_areal", found["decode_factor_laminar"])
    if "decode_factor_own" in found:
        found.setdefault("decode_factor_verl", found["decode_factor_own"])
    return found


def streamrl_observations(stages: Sequence[Mapping[str, Any]]) -> list[Observation]:
    """Samples a second."""
    by_name = {(one["lengths"], one["model"], one["system"]): one for one in stages}
    found = []
    for row in STREAMRL:
        for name, published in zip(("verl", "colocation", "sync", "async"), row.published, strict=False):
            stage = by_name[row.lengths, row.model, "colocation" if name == "verl" else name]

            def predict(values: Values, row=row, name=name, stage=stage) -> float:
                return 1024 / _streamrl_step_s(row, name, stage, values)

            found.append(
                Observation(f"{row.lengths} {row.model} {name}", f"{row.lengths} {row.model}", published, predict)
            )
    return found


def _streamrl_step_s(row: StreamRow, name: str, stage: Mapping[str, Any], values: Values) -> float:
    plant, work, _ = streamrl(row, name, with_followers(values))
    factor = with_followers(values).get("decode_factor_verl" if name == "verl" else "decode_factor_own", 1.0)
    train_s = work.tokens * plant.train_s_per_token + plant.train_s_per_step
    if name == "async":
        return max(factor * stage["batch_s"], train_s + plant.stall_s)
    ends = factor * np.array(stage["ends_s"])
    if STREAMRL_SYSTEMS[name].trains == "batch":
        return float(ends[-1]) + train_s
    # A trainer that takes samples as they end is through with all when what ends last, and all behind it, is done.
    left = 1 - np.linspace(0, 1, len(ends))
    return float((ends + train_s * left).max()) + plant.sync_s


@dataclass(frozen=True)
class Fit:
    """Values, and the mean absolute error of the logarithm on rows left out."""

    values: Values
    error: float


def fit(observations: Sequence[Observation], start: Values) -> Values:
    """By least squares of the logarithms, in which a row that is far off weighs no more than its distance."""
    names = list(start)

    def residuals(logs: np.ndarray) -> np.ndarray:
        values = dict(zip(names, np.exp(logs), strict=True))
        return np.array([math.log(one.predict(values) / one.published) for one in observations])

    begin = np.log(np.array([start[name] for name in names]))
    found = least_squares(residuals, begin, loss="soft_l1", f_scale=0.1, diff_step=1e-3, max_nfev=60)
    return {name: float(value) for name, value in zip(names, np.exp(found.x), strict=True)}


def cross_validated(observations: Sequence[Observation], start: Values) -> Fit:
    """Fitted on all; the error is that of each configuration by a fit on the others."""
    values = fit(observations, start)
    errors = []
    for fold in sorted({one.fold for one in observations}):
        others = fit([one for one in observations if one.fold != fold], values)
        errors += [abs(math.log(one.predict(others) / one.published)) for one in observations if one.fold == fold]
    return Fit(values, float(np.mean(errors)))


def chosen(
    observations: Sequence[Observation], always: Values, terms: Mapping[str, Mapping[str, Form]]
) -> tuple[Values, dict[str, str], list[dict[str, Any]]]:
    """Values, the form of each term, and every form that was tried with its error.

    One term after the other, each with the present forms of the others, until none changes.
    """
    forms = {term: next(iter(options)) for term, options in terms.items()}
    tried: dict[tuple[str, ...], Fit] = {}

    def tested(choice: Mapping[str, str]) -> Fit:
        key = tuple(choice.values())
        if key not in tried:
            start = dict(always)
            for term, form in choice.items():
                start |= terms[term][form]
            tried[key] = cross_validated(observations, start)
        return tried[key]

    for _ in range(4):
        before = dict(forms)
        for term, options in terms.items():
            ranked = {
                form: tested({**forms, term: form}).error + WORTH * len(parameters)
                for form, parameters in options.items()
            }
            forms[term] = min(ranked, key=lambda form: ranked[form])
        if forms == before:
            break
    record = [{**dict(zip(terms, key, strict=True)), "error": found.error} for key, found in tried.items()]
    return tested(forms).values, forms, record


def told(
    paper: str, terms: Mapping[str, Mapping[str, Form]], forms: Mapping[str, str], values: Values
) -> Iterator[dict[str, str]]:
    """The chosen form of each term with its values, in words."""
    always = ", ".join(f"{name} {values[name]:.3g}" for name in ALWAYS[paper])
    yield {"paper": paper, "term": "training", "form": "cost of a token by model size", "values": always}
    for term, form in forms.items():
        found = ", ".join(f"{name} {values[name]:.3g}" for name in terms[term][form])
        yield {"paper": paper, "term": term, "form": form, "values": found}
