"""Fits what no paper says: on the 7B and 32B rows of Laminar's figure 11 with 32B's of its table 1, and StreamRL's 5K
and 20K rows of figure 8.

Each term has several forms; the one with which rows that were left out are predicted best is taken (leave one
configuration out, mean absolute error of the logarithm), a form with one parameter more only if it is better by
``WORTH``. Stages are simulated by themselves, once: with all times of a decode curve multiplied by f, a batch takes f
times as long, so the fit does without it. Their composition is a formula here: a step takes what its slowest stage
takes where they overlap, and their sum where they do not. The rows of the results are then simulated whole.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from benchmarks.simulation.papers import LAMINAR, REPACK, STREAMRL, SYSTEMS, LaminarRow, StreamRow
from benchmarks.simulation.parameters import STREAMRL_SYSTEMS, VERL_BASED, decode_factor, known, laminar, streamrl
from benchmarks.simulation.parameters import train_s as train_s_of
from benchmarks.simulation.plant import Plant, System, Workload
from benchmarks.simulation.world import World

QUANTILES = 33
NEUTRAL = {"train_gpu_s_per_token": 1e-15, "train_exponent": 0.0}
"""The trainer takes no time."""


def laminar_stages() -> Iterator[tuple[LaminarRow, str]]:
    """Of figure 11's fitted rows."""
    for row in LAMINAR:
        for name in ("verl", "one_step", "areal", "laminar") if row.published else ():
            yield row, name
        if (row.model, row.gpus) == ("32B", 128):
            yield row, "laminar_without_repack"


def laminar_stage(row: LaminarRow, name: str) -> dict[str, Any]:
    """Seconds of a batch; or tokens a second of replicas that are never held back."""
    if name in ("verl", "one_step"):
        return _named(row, name) | {"batch_s": _batch_s(row, name)}
    return _named(row, name) | {"rate": _rate(row, name)}


def _named(row: LaminarRow | StreamRow, name: str) -> dict[str, Any]:
    return {"model": row.model, "gpus": row.gpus, "system": name}


def stage(of: tuple[LaminarRow | StreamRow, str]) -> dict[str, Any]:
    """One of either."""
    row, name = of
    return laminar_stage(row, name) if isinstance(row, LaminarRow) else streamrl_stage(row, name)


def _batch_s(row: LaminarRow, name: str) -> float:
    plant, work, system = laminar(row, name, NEUTRAL)
    system = replace(system, mode="synchronous", adoption="barrier")
    return World(_at_once(plant), work, system, 0).run(1).step_s(0)


def _at_once(plant: Plant) -> Plant:
    return replace(plant, sync_s=0.0, stall_s=0.0, adopt_s=0.0, arrivals_s=())


def _rate(row: LaminarRow, name: str) -> float:
    plant, work, system = laminar(row, "laminar" if name == "areal" else name, NEUTRAL)
    gpus = row.split(name)[1] // (row.split("laminar")[1] // plant.replicas)
    plant = replace(_at_once(plant), replicas=gpus)
    # Enough for every replica to begin a third batch.
    steps = max(4, min(12, 3 * plant.replicas * plant.slots // work.samples))
    found = World(plant, work, system, 0).run(steps)
    return found.rate(steps // 2)


def streamrl_stages() -> Iterator[tuple[StreamRow, str]]:
    """Of figure 8's fitted rows."""
    for row in STREAMRL:
        for name in ("colocation", "sync", "async") if row.published else ():
            yield row, name


def streamrl_stage(row: StreamRow, name: str) -> dict[str, Any]:
    """When a batch's completions end, by their share of its tokens; or seconds of a batch that is generated beside the
    next one.
    """
    plant, work, system = streamrl(row, name, NEUTRAL)
    plant = _at_once(plant)
    found = {"lengths": row.lengths, **_named(row, name), "tokens": work.tokens}
    if name == "async":
        return found | {"batch_s": World(plant, work, system, 0).run(6).step_s(2)}
    return found | {"ends_s": _ends(plant, work, replace(system, mode="synchronous"))}


def _ends(plant: Plant, work: Workload, system: System) -> list[float]:
    found = World(plant, work, replace(system, trains="batch"), 0).run(1).wholes
    times, tokens = (np.array(column, float) for column in zip(*found, strict=True))
    shares = np.cumsum(tokens) / tokens.sum()
    return [float(value) for value in np.interp(np.linspace(0, 1, QUANTILES), shares, times)]


WORTH = 0.003
REPACKED = {"with": "laminar", "without": "laminar_without_repack"}
FEW = 64
WIDTH = 2.5
"""How far a parameter may be from where its search begins, in its logarithm: a factor of twelve."""
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
    "decoding with vLLM": {
        "as measured": {},
        "verl's times a factor": {"decode_factor_verl": 1.5},
        "times a factor": {"decode_factor_vllm": 1.5},
        "on several GPUs times a factor": {"decode_factor_parallel": 1.5},
        "verl's times a factor, Laminar's times another": {"decode_factor_vllm": 1.1, "decode_factor_verl": 1.3},
        "on several GPUs times a factor, verl's times another": {
            "decode_factor_parallel": 1.4,
            "decode_factor_verl": 1.2,
        },
    },
    "partial rollout": {
        "as Laminar trains": {},
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
    "verl training": {"as ColocationRL": {}, "times a factor": {"train_factor_verl": 1.5}},
    "colocation": {
        "nothing": {},
        "seconds a step": {"switch_s": 10.0},
        "training times a factor": {"train_factor_colocated": 1.5},
    },
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
    place: Mapping[str, Any] = field(default_factory=dict)

    def row(self, values: Values) -> dict[str, Any]:
        """As a row of the results, by the formula and not by simulating it whole."""
        return {**self.place, "predicted": self.predict(values), "published": self.published, "fitted": True}


@dataclass(frozen=True)
class _Composed:
    """A configuration's stages, and what does not depend on fitted values.

    Tokens of a step, GPUs that train, seconds to hand weights over and of a synchronisation.
    """

    row: LaminarRow | StreamRow
    name: str
    stage: Mapping[str, Any]
    tokens: float
    training: int
    stall_s: float
    sync_s: float

    @property
    def place(self) -> dict[str, Any]:
        """What a row says of where it is from."""
        is_laminar = isinstance(self.row, LaminarRow)
        return {
            "paper": "laminar" if is_laminar else "streamrl",
            "figure": "11" if is_laminar else "8",
            "model": self.row.model,
            "gpus": self.row.gpus,
            "lengths": "" if isinstance(self.row, LaminarRow) else self.row.lengths,
            "system": self.name,
        }


def laminar_observations(stages: Sequence[Mapping[str, Any]]) -> list[Observation]:
    """Thousands of tokens a second."""
    by_name = {(stage["model"], stage["gpus"], stage["system"]): stage for stage in stages}
    found = []
    for row in LAMINAR:
        for name, published in zip(SYSTEMS, row.published, strict=False):
            stage = by_name[row.model, row.gpus, "one_step" if name == "stream" else name]
            plant, work, _ = laminar(row, name, NEUTRAL)
            training = row.split(name)[0]
            composed = _Composed(row, name, stage, work.tokens, training, plant.stall_s, plant.sync_s)
            predict = partial(_laminar_rate, composed)
            fold = f"{row.model} {row.gpus}"
            found.append(Observation(f"{fold} {name}", fold, published, predict, composed.place))
    return [*found, *_sampled_observations(by_name)]


def _sampled_observations(by_name: Mapping[tuple[Any, ...], Mapping[str, Any]]) -> Iterator[Observation]:
    """Laminar's table 1: what replicas of 32B sample, whoever trains."""
    _, work, _ = laminar(next(row for row in LAMINAR if (row.model, row.gpus) == ("32B", 128)), "laminar", NEUTRAL)
    for name, system in REPACKED.items():
        rate = by_name["32B", 128, system]["rate"] * work.samples * work.lengths.mean / work.tokens
        place = {"paper": "laminar", "figure": "table 1", "model": "32B", "gpus": 128, "lengths": ""}
        place["system"] = f"{name} repack: rate"
        predict = partial(_sampled_rate, rate, known("replica_gpus")["32B"])
        yield Observation(f"table 1 {name}", "32B 128", REPACK[name]["rate"], predict, place)


def _sampled_rate(rate: float, gpus: int, values: Values) -> float:
    return 1e-3 * rate / decode_factor("laminar", gpus, values)


def _laminar_rate(of: _Composed, values: Values) -> float:
    per_token, train_s = train_s_of("laminar", of.row.model, of.training, values)
    is_verl = of.name in VERL_BASED
    if is_verl:
        per_token += values.get("control_in_training_s_per_token", 0.0)
    if of.name == "areal":
        train_s += values.get("areal_s_per_step", 0.0)
    train_s += of.tokens * per_token + of.stall_s
    gpus = known("replica_gpus_baselines" if is_verl else "replica_gpus")[of.row.model]
    factor = decode_factor(of.name, gpus, values)
    if "rate" in of.stage:
        return 1e-3 * min(float(of.stage["rate"]) / factor, of.tokens / train_s)
    generation_s = factor * float(of.stage["batch_s"])
    control_s = of.tokens * values.get("control_s_per_token", 0.0)
    if of.name == "verl":
        return 1e-3 * of.tokens / (max(generation_s, control_s) + train_s)
    return 1e-3 * of.tokens / (max(generation_s, control_s, train_s) + of.sync_s)


def streamrl_observations(stages: Sequence[Mapping[str, Any]]) -> list[Observation]:
    """Samples a second."""
    by_name = {(one["lengths"], one["model"], one["system"]): one for one in stages}
    found = []
    for row in STREAMRL:
        for name, published in zip(("verl", "colocation", "sync", "async"), row.published, strict=False):
            stage = by_name[row.lengths, row.model, "colocation" if name == "verl" else name]
            plant, work, system = streamrl(row, name, NEUTRAL)
            training = row.gpus if system.colocated else row.gpus - row.generating
            composed = _Composed(row, name, stage, work.tokens, training, plant.stall_s, plant.sync_s)
            predict = partial(_streamrl_rate, composed)
            fold = f"{row.lengths} {row.model}"
            found.append(Observation(f"{fold} {name}", fold, published, predict, composed.place))
    return found


def _streamrl_rate(of: _Composed, values: Values) -> float:
    per_token, train_s = train_s_of("streamrl", of.row.model, of.training, values)
    if STREAMRL_SYSTEMS[of.name].colocated:
        train_s += values.get("switch_s", 0.0)
        per_token *= values.get("train_factor_colocated", 1.0)
    if of.name == "verl":
        per_token *= values.get("train_factor_verl", 1.0)
    train_s += of.tokens * per_token
    factor = values.get("decode_factor_own", 1.0)
    if of.name == "async":
        return 1024 / max(factor * float(of.stage["batch_s"]), train_s + of.stall_s)
    ends = factor * np.array(of.stage["ends_s"])
    if STREAMRL_SYSTEMS[of.name].trains == "batch":
        return 1024 / (float(ends[-1]) + train_s)
    # A trainer that takes samples as they end is through with all when what ends last, and all behind it, is done.
    left = 1 - np.linspace(0, 1, len(ends))
    return 1024 / (float((ends + train_s * left).max()) + of.sync_s)


@dataclass(frozen=True)
class Fit:
    """Values, and the mean absolute error of the logarithm on rows left out."""

    values: Values
    error: float


def fit(observations: Sequence[Observation], start: Values) -> Values:
    """By least squares of the logarithms, in which a row that is far off weighs no more than its distance."""
    from scipy.optimize import least_squares  # takes a second, which predictions do without

    names = list(start)

    def residuals(logs: np.ndarray) -> np.ndarray:
        values = dict(zip(names, np.exp(logs), strict=True))
        return np.array([math.log(one.predict(values) / one.published) for one in observations])

    begin = np.log(np.array([start[name] for name in names]))
    near = (begin - WIDTH, begin + WIDTH)
    found = least_squares(residuals, begin, bounds=near, loss="soft_l1", f_scale=0.1, diff_step=1e-3, max_nfev=60)
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

    All together if these are few; else one term after the other, with the present forms of the others, until none
    changes.
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

    def ranked(choice: Mapping[str, str]) -> float:
        parameters = sum(len(terms[term][form]) for term, form in choice.items())
        return tested(choice).error + WORTH * parameters

    if math.prod(map(len, terms.values())) <= FEW:
        every = (dict(zip(terms, choice, strict=True)) for choice in product(*terms.values()))
        forms = min(every, key=ranked)
    for _ in range(4):
        before = dict(forms)
        for term, options in terms.items():
            ranks = {form: ranked({**forms, term: form}) for form in options}
            forms[term] = min(ranks, key=ranks.__getitem__)
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
