"""Fits gradient-boosted quantiles to what was observed. Pure: the same observations give the same trees.

A completion that the limit cut off counts with the limit. For quantiles that is exact as long as the limit stays
(Powell 1986: a quantile of min(length, limit) is the minimum of the quantile and the limit), and min(length, limit) is
what a worker is busy with. One that a lower limit cut off earlier only says "this or more": it counts with the median
of the longer lengths of its data set (mass moved to the right, Efron 1967).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from producers.lengths.learned.forest import Forest
from producers.lengths.learned.memory import Observations

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
