"""Boosted trees that predict completion lengths from a prompt's features: fitting, prediction, saving and loading.

The same observations give the same trees.

Invariant every_walk_ends: a node's children come after it, and a leaf is its own child.
"""

import ctypes
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from streamrl.producers.lengths.learned.features import LAYOUT, ROW_WIDTH, Row, text_features
from streamrl.producers.lengths.learned.history import Observations
from streamrl.producers.lengths.learned.model_store import Manifest, ModelStore
from streamrl.schemas.errors import MalformedFrame
from streamrl.schemas.trajectories import Prompt

KIND: Literal["trees"] = "trees"
FOREST = "forest.safetensors"
"""File of the trees, in safetensors, a format that cannot contain code."""
_ARRAYS = {"feature": "int32", "threshold": "float64", "children": "int32", "value": "float64", "roots": "int32"}
MAX_DEPTH = 64
"""Largest depth accepted from a file, so that a damaged one cannot make predictions slow. Fitted trees have at most 6.
"""
ROUNDS = 80
"""Trees per quantile. With 4096 observations a fit takes about one core second."""
PARAMETERS: dict[str, Any] = {
    "objective": "quantile",
    "learning_rate": 0.1,
    "num_leaves": 15,
    "max_depth": 6,
    "min_data_in_leaf": 24,
    "feature_fraction": 0.4,  # there are many hashed columns, and each tree needs few
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "max_bin": 63,
    "lambda_l2": 1.0,
    "num_threads": 1,  # the rest of the dispatcher runs during a fit
    "deterministic": True,
    "force_col_wise": True,
    "seed": 0,
    "verbosity": -1,
}
Levels = Mapping[str, tuple[float, int]]


@dataclass(frozen=True, slots=True)
class Forest:
    """Q ensembles of T trees over N nodes, as flat arrays. Numpy walks all trees at once, in about 50 µs per prompt.

    ``feature`` int32 [N], ``threshold`` float64 [N], ``children`` int32 [2 N] (first the child for features up to the
    threshold, then the one above), ``value`` float64 [N], ``roots`` int32 [Q, T]; ``depth``: most steps from a root to
    a leaf.
    """

    feature: NDArray[np.int32]
    threshold: NDArray[np.float64]
    children: NDArray[np.int32]
    value: NDArray[np.float64]
    roots: NDArray[np.int32]
    depth: int

    def predict(self, row: Row) -> NDArray[np.float64]:
        """The sum of the leaves that a row of features reaches, float64 [Q]."""
        node = self.roots.ravel()  # [Q × T]: the present node of each tree's walk
        for _ in range(self.depth):
            # children[2 n] where the feature is at most the threshold, children[2 n + 1] where it is above.
            node = self.children[2 * node + (row[self.feature[node]] > self.threshold[node])]
        sums: NDArray[np.float64] = self.value[node].reshape(self.roots.shape).sum(axis=1)
        return sums

    def check(self, width: int, quantiles: int) -> None:
        """Check that the arrays are a valid forest over ``width`` features.

        Raises:
            MalformedFrame: they are not; it names the faults.
        """
        nodes = len(self.feature)
        # children are stored in pairs: pair n belongs to node n.
        own = np.repeat(np.arange(nodes), 2)
        wrong = {
            "arrays of different lengths": not len(self.threshold)
            == len(self.value)
            == nodes
            == len(self.children) / 2,
            "no trees": self.roots.ndim != 2 or self.roots.shape[0] != quantiles or self.roots.size == 0,
            "depth": not 0 <= self.depth <= MAX_DEPTH,
        }
        # Only if the shapes are right, or the comparisons themselves would fail.
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


@dataclass(frozen=True, slots=True)
class LengthModel:
    """``forest``: predicts the median and the upper quantile; ``version``: counts fits; ``observations``: fitted to."""

    forest: Forest
    version: int
    policy_version: int
    observations: int

    @property
    def name(self) -> str:
        """Name of the model in estimates."""
        return f"learned/v{self.version}"

    def quantiles(self, prompt: Prompt) -> tuple[float, float]:
        """Median and upper quantile of log(length) minus the level of the data set, by the prompt's text."""
        median, upper = map(float, self.forest.predict(text_features(prompt)))
        return median, upper


def fit(observed: Observations, quantiles: tuple[float, ...], limit: int) -> Forest:
    """Trees for each quantile of log(length) - level; ``limit``: present limit of a completion's tokens.

    They are boosted on the pinball loss of quantile q, with u = target - prediction (Koenker and Bassett 1978):

        loss(u) = max(q × u, (q - 1) × u)
    """
    lightgbm = import_lightgbm()
    # float64 [N], natural logarithms: how far each completion was above the level of its data set.
    target = np.log(lengths_to_learn(observed, limit)) - observed.level
    forests = []
    for quantile in quantiles:
        data = lightgbm.Dataset(observed.rows, target, params={"max_bin": PARAMETERS["max_bin"], "verbosity": -1})
        booster = lightgbm.train({**PARAMETERS, "alpha": quantile}, data, num_boost_round=ROUNDS)
        forests.append([tree["tree_structure"] for tree in booster.dump_model()["tree_info"]])
    return packed(forests)


def import_lightgbm() -> ModuleType:
    """The LightGBM library, which takes half a second to import.

    Its wheel needs the system's OpenMP, which comes with a compiler. On a machine without one only torch's copy exists.
    That copy is loaded first: the dynamic linker then uses it for every library that needs the same name.
    """
    try:
        return importlib.import_module("lightgbm")
    except OSError:
        torch = find_spec("torch")
        if torch is None or torch.origin is None:
            raise
        ctypes.CDLL(str(Path(torch.origin).parent / "lib" / "libgomp.so.1"), mode=ctypes.RTLD_GLOBAL)
        return importlib.import_module("lightgbm")


def lengths_to_learn(observed: Observations, limit: int) -> NDArray[np.float64]:
    """The lengths, at most the limit, with those raised that a lower limit had cut off; float64 [N].

    A completion that the present limit cut off counts with the limit. For quantiles this is exact (Powell 1986): a
    quantile of min(length, limit) is the minimum of the quantile and the limit, and min(length, limit) is the work of a
    worker. A completion that a lower limit cut off earlier only shows a lower bound. It counts with the median of the
    longer lengths of its data set (mass moved to the right, Efron 1967).
    """
    lengths: NDArray[np.float64] = np.clip(observed.length.astype(np.float64), 1.0, limit)
    cut_off = observed.censored & (observed.length < limit)
    for dataset in np.unique(observed.dataset[cut_off]):
        of_dataset = np.sort(lengths[observed.dataset == dataset])
        own = np.flatnonzero(cut_off & (observed.dataset == dataset))
        # longer[i]: the first place in ``of_dataset`` above a cut-off length; the median is halfway to the end.
        longer = np.searchsorted(of_dataset, lengths[own], side="right")
        has_longer = longer < len(of_dataset)
        lengths[own[has_longer]] = of_dataset[(longer[has_longer] + len(of_dataset) - 1) // 2]
    return lengths


def packed(ensembles: list[list[dict[str, Any]]]) -> Forest:
    """Nested trees, as LightGBM dumps them, as flat arrays. Shorter ensembles are padded with trees of value 0."""
    nodes: list[tuple[int, float, int, int, float]] = []
    deepest = 0
    most = max(map(len, ensembles))
    roots = np.zeros((len(ensembles), most), np.int32)
    for row, ensemble in enumerate(ensembles):
        # A single leaf of 0 adds nothing to a sum.
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
        # A leaf is its own child on both sides: walks take equally many steps in every tree, and stay at the leaf.
        nodes.append((0, 0.0, own, own, float(tree["leaf_value"])))
        return 0
    # The node's place comes before its children's, and is filled in when theirs are known.
    nodes.append((0, 0.0, own, own, 0.0))
    # Depth first, so the left child is the very next node: own + 1.
    depth = _add(tree["left_child"], nodes)
    right = len(nodes)
    depth = max(depth, _add(tree["right_child"], nodes))
    nodes[own] = (int(tree["split_feature"]), float(tree["threshold"]), own + 1, right, 0.0)
    return depth + 1


def save(model: LengthModel, levels: Levels, folder: Path) -> Path:
    """Save a model in the folder, under its version.

    Raises:
        OSError: it cannot be written.
    """
    manifest = Manifest(
        version=model.version,
        policy_version=model.policy_version,
        observations=model.observations,
        levels=dict(levels),
        details={"layout": LAYOUT, "depth": model.forest.depth},
    )
    arrays = {name: getattr(model.forest, name) for name in _ARRAYS}
    return ModelStore(folder, KIND).save(manifest, lambda unfinished: save_file(arrays, unfinished / FOREST))


def load_newest(folder: Path, newer_than: int = 0) -> tuple[LengthModel, Levels] | None:
    """The newest usable model of the folder, and the levels that it was fitted with; None if there is none."""
    return ModelStore(folder, KIND).load_newest(load, newer_than)


def load(path: Path, manifest: Manifest) -> tuple[LengthModel, Levels]:
    """Read one version.

    Raises:
        MalformedFrame: it is not a length model, or is one over other features.
    """
    layout, depth = manifest.details.get("layout"), int(manifest.details.get("depth", -1))
    try:
        arrays = load_file(path / FOREST)
    except (SafetensorError, OSError, ValueError) as error:
        raise MalformedFrame(f"expected a length model in {path}, got: {error}; delete it") from error
    if layout != LAYOUT or {name: str(array.dtype) for name, array in arrays.items()} != _ARRAYS:
        raise MalformedFrame(f"expected a length model of layout {LAYOUT} in {path}, got {layout}; delete it")
    forest = Forest(depth=depth, **arrays)
    forest.check(ROW_WIDTH, quantiles=2)
    return LengthModel(forest, manifest.version, manifest.policy_version, manifest.observations), manifest.levels
