"""Fits in a thread of its own, one fit at a time; the caller goes on and takes the result when it is there.

It does not know what is fitted. A fit that fails leaves what was there; it is counted and the next one is tried.
"""

import contextlib
import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from producers.lengths.learned.features import LAYOUT, ROW_WIDTH, Row, text_features
from producers.lengths.learned.history import Observations
from schemas.errors import MalformedFrame
from schemas.trajectories import Prompt

# Boosted trees as flat arrays, walked all at once with numpy: some 50 µs for all quantiles of a prompt. Invariant
# ``every_walk_ends``: a node's children come after it, and a leaf is its own child.

MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Forest:
    """Q ensembles of T trees over N nodes.

    ``feature`` int32 [N], ``threshold`` float64 [N], ``children`` int32 [2 N] (at most the threshold, above it),
    ``value`` float64 [N], ``roots`` int32 [Q, T]; ``depth``: most steps from a root to a leaf.
    """

    feature: NDArray[np.int32]
    threshold: NDArray[np.float64]
    children: NDArray[np.int32]
    value: NDArray[np.float64]
    roots: NDArray[np.int32]
    depth: int

    def predict(self, row: Row) -> NDArray[np.float64]:
        """The sum of the leaves that a row of features ends in, float64 [Q]."""
        node = self.roots.ravel()
        for _ in range(self.depth):
            node = self.children[2 * node + (row[self.feature[node]] > self.threshold[node])]
        sums: NDArray[np.float64] = self.value[node].reshape(self.roots.shape).sum(axis=1)
        return sums

    def check(self, width: int, quantiles: int) -> None:
        """Refuse arrays that are not such a forest over so many features.

        Raises:
            MalformedFrame: with what is wrong.
        """
        nodes = len(self.feature)
        own = np.repeat(np.arange(nodes), 2)
        wrong = {
            "arrays of different lengths": not len(self.threshold)
            == len(self.value)
            == nodes
            == len(self.children) / 2,
            "no trees": self.roots.ndim != 2 or self.roots.shape[0] != quantiles or self.roots.size == 0,
            "depth": not 0 <= self.depth <= MAX_DEPTH,
        }
        if not any(wrong.values()):
            wrong = {
                "unknown features": bool(((self.feature < 0) | (self.feature >= width)).any()),
                "nodes out of order": bool(((self.children < own) | (self.children >= nodes)).any()),
                "roots out of range": bool(((self.roots < 0) | (self.roots >= nodes)).any()),
                "values that are no numbers": not (np.isfinite(self.value).all() and np.isfinite(self.threshold).all()),
            }
        if reasons := [reason for reason, is_wrong in wrong.items() if is_wrong]:
            raise MalformedFrame(
                f"expected the trees of a length model over {width} features, got {', '.join(reasons)}"
            )


log = structlog.get_logger()


class Refitter:
    """``failures`` counts fits that raised."""

    def __init__(self) -> None:
        self.failures = 0
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a fit is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, fit: Callable[[], None]) -> None:
        """Begin a fit; only while none is under way. The thread ends by itself, within seconds."""
        assert not self.is_busy, "one fit at a time"
        self._thread = threading.Thread(target=self._run, args=(fit,), name="length-refit")
        self._thread.start()

    def _run(self, fit: Callable[[], None]) -> None:
        try:
            fit()
        except Exception as error:
            self.failures += 1
            log.warning("length model not fitted", error=repr(error), failures=self.failures)

    def wait(self) -> None:
        """Until no fit is under way."""
        if self._thread is not None:
            self._thread.join()


# Fits gradient-boosted quantiles to what was observed. Pure: the same observations give the same trees. A completion
# that the limit cut off counts with the limit. For quantiles that is exact as long as the limit stays (Powell 1986: a
# quantile of min(length, limit) is the minimum of the quantile and the limit), and min(length, limit) is what a
# worker is busy with. One that a lower limit cut off earlier only says "this or more": it counts with the median of
# the longer lengths of its data set (mass moved to the right, Efron 1967).

ROUNDS = 80
PARAMETERS: dict[str, Any] = {
    "objective": "quantile",
    "learning_rate": 0.1,
    "num_leaves": 15,
    "max_depth": 6,
    "min_data_in_leaf": 24,
    "feature_fraction": 0.4,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "max_bin": 63,
    "lambda_l2": 1.0,
    "num_threads": 1,
    "deterministic": True,
    "force_col_wise": True,
    "seed": 0,
    "verbosity": -1,
}


def fit(observed: Observations, quantiles: tuple[float, ...], limit: int) -> Forest:
    """Trees for each quantile of the logarithm of length over level; ``limit``: most tokens of a completion now."""
    import lightgbm

    target = np.log(lengths_to_learn(observed, limit)) - observed.level
    forests = []
    for quantile in quantiles:
        data = lightgbm.Dataset(observed.rows, target, params={"max_bin": PARAMETERS["max_bin"], "verbosity": -1})
        booster = lightgbm.train({**PARAMETERS, "alpha": quantile}, data, num_boost_round=ROUNDS)
        forests.append([tree["tree_structure"] for tree in booster.dump_model()["tree_info"]])
    return packed(forests)


def lengths_to_learn(observed: Observations, limit: int) -> NDArray[np.float64]:
    """The lengths, at most the limit, with those moved up that a lower limit had cut off; float64 [N]."""
    lengths: NDArray[np.float64] = np.clip(observed.length.astype(np.float64), 1.0, limit)
    cut_off = observed.censored & (observed.length < limit)
    for dataset in np.unique(observed.dataset[cut_off]):
        alike = np.sort(lengths[observed.dataset == dataset])
        own = np.flatnonzero(cut_off & (observed.dataset == dataset))
        longer = np.searchsorted(alike, lengths[own], side="right")
        has_longer = longer < len(alike)
        lengths[own[has_longer]] = alike[(longer[has_longer] + len(alike) - 1) // 2]
    return lengths


def packed(ensembles: list[list[dict[str, Any]]]) -> Forest:
    """Nested trees, as LightGBM dumps them, in flat arrays; shorter ensembles are filled up with trees of zero."""
    nodes: list[tuple[int, float, int, int, float]] = []
    deepest = 0
    most = max(map(len, ensembles))
    roots = np.zeros((len(ensembles), most), np.int32)
    for row, ensemble in enumerate(ensembles):
        for column, tree in enumerate([*ensemble, *[{"leaf_value": 0.0}] * (most - len(ensemble))]):
            roots[row, column] = len(nodes)
            deepest = max(deepest, _add(tree, nodes))
    feature, threshold, left, right, value = zip(*nodes, strict=True)
    return Forest(
        feature=np.array(feature, np.int32),
        threshold=np.array(threshold, np.float64),
        children=np.column_stack([left, right]).astype(np.int32).ravel(),
        value=np.array(value, np.float64),
        roots=roots,
        depth=deepest,
    )


def _add(tree: dict[str, Any], nodes: list[tuple[int, float, int, int, float]]) -> int:
    """Append a tree, parents first; returns its depth."""
    own = len(nodes)
    if "split_feature" not in tree:
        nodes.append((0, 0.0, own, own, float(tree["leaf_value"])))
        return 0
    nodes.append((0, 0.0, own, own, 0.0))
    depth = _add(tree["left_child"], nodes)
    right = len(nodes)
    depth = max(depth, _add(tree["right_child"], nodes))
    nodes[own] = (int(tree["split_feature"]), float(tree["threshold"]), own + 1, right, 0.0)
    return depth + 1


# A fitted model with its version, and the versioned files it is kept in. Safetensors: nothing in them can run. It
# does not know prompts; ``policy_version`` is the newest policy it was fitted to.

KEPT_FILES = 3
_NAME = re.compile(r"lengths-(\d{8})\.safetensors")
_ARRAYS = {"feature": "int32", "threshold": "float64", "children": "int32", "value": "float64", "roots": "int32"}
Levels = Mapping[str, tuple[float, int]]


@dataclass(frozen=True, slots=True)
class LengthModel:
    """``forest`` gives the median and the upper quantile; ``version`` counts fits; ``observations`` were fitted to."""

    forest: Forest
    version: int
    policy_version: int
    observations: int

    @property
    def name(self) -> str:
        """How estimates call it."""
        return f"learned/v{self.version}"

    def quantiles(self, prompt: Prompt) -> tuple[float, float]:
        """Median and upper of the logarithm of length over its data set's level, by the prompt's text."""
        median, upper = map(float, self.forest.predict(text_features(prompt)))
        return median, upper


class _About(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    layout: int
    depth: int
    version: int = Field(ge=1)
    policy_version: int = Field(ge=0)
    observations: int = Field(ge=0)
    levels: dict[str, tuple[float, int]]


def save(model: LengthModel, levels: Levels, folder: Path) -> Path:
    """Write the next file of the folder, whole or not at all; the oldest ones go.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"lengths-{model.version:08d}.safetensors"
    about = _About(
        layout=LAYOUT,
        depth=model.forest.depth,
        version=model.version,
        policy_version=model.policy_version,
        observations=model.observations,
        levels=dict(levels),
    )
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    save_file({name: getattr(model.forest, name) for name in _ARRAYS}, unfinished, {"about": about.model_dump_json()})
    unfinished.replace(path)
    for _, old in _files(folder)[KEPT_FILES:]:
        old.unlink(missing_ok=True)
    return path


def load_newest(folder: Path, newer_than: int = 0) -> tuple[LengthModel, Levels] | None:
    """The newest file that can be used; none if there is none. Files that cannot be used are left alone."""
    for version, path in _files(folder):
        if version <= newer_than:
            break
        try:
            return load(path)
        except (MalformedFrame, OSError) as error:
            log.warning("length model left aside", path=str(path), error=str(error))
    return None


def load(path: Path) -> tuple[LengthModel, Levels]:
    """Read one file.

    Raises:
        MalformedFrame: it is not a length model, or one over other features.
    """
    try:
        with safe_open(path, "np") as file:
            about = _About.model_validate(json.loads((file.metadata() or {}).get("about", "")))
            arrays = {name: file.get_tensor(name) for name in _ARRAYS}
    except (SafetensorError, ValidationError, ValueError) as error:
        raise MalformedFrame(f"expected a length model in {path}, got: {error}; delete it") from error
    if about.layout != LAYOUT or any(arrays[name].dtype != np.dtype(dtype) for name, dtype in _ARRAYS.items()):
        raise MalformedFrame(f"expected a length model of layout {LAYOUT} in {path}, got {about.layout}; delete it")
    forest = Forest(depth=about.depth, **arrays)
    forest.check(ROW_WIDTH, quantiles=2)
    return LengthModel(forest, about.version, about.policy_version, about.observations), about.levels


def _files(folder: Path) -> list[tuple[int, Path]]:
    """Newest first."""
    found: list[tuple[int, Path]] = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if match := _NAME.fullmatch(path.name):
                found.append((int(match[1]), path))
    return sorted(found, reverse=True)
