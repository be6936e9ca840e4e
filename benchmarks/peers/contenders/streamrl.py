"""StreamRL on the plan, in all its processes, embedded Kafka included: ``streamrl run`` in one mode or the other."""

import json
import sys
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.commands import launch
from benchmarks.peers.contenders.plan import Plan, Saved, Trained

Settings = dict[str, dict[str, Any]]


def merged(*layers: Settings) -> Settings:
    """Settings by section; later layers replace keys of earlier ones."""
    tree: Settings = {}
    for layer in layers:
        for section, values in layer.items():
            tree[section] = tree.get(section, {}) | values
    return tree


RUN = "run"
KEPT = 1_000_000
_ASYNCHRONOUS: Settings = {
    "run": {"workers": 1},
    "loop": {"max_staleness": 3},
    "generation": {"max_num_seqs": 128, "threads": 1},
    "training": {"threads": 1},
}
_VALUE = {"dispatch": {"value": True}}
TUNED: dict[str, Settings] = {
    "trajectory_async": _ASYNCHRONOUS,
    "trajectory_async, by value": merged(_ASYNCHRONOUS, _VALUE),
    "trajectory_async, by value, padded": merged(_ASYNCHRONOUS, _VALUE, {"training": {"packing": "padded"}}),
    "trajectory_async, zero advantages computed": merged(_ASYNCHRONOUS, {"training": {"compute_zero_advantage": True}}),
    "synchronous": {
        "run": {"workers": 2},
        "generation": {"max_num_seqs": 64, "threads": 1},
        "training": {"threads": 2},
    },
}
"""The best settings found for each mode on two cores, see the README for what was tried; a key begins with the mode.

Prompts of a group are computed once unless the variant is padded. Samples of advantage 0 have no gradient, and ours are
not computed unless told to; TRL computes its own.
"""


def train(variant: str, plan: Plan, overrides: Settings | None = None) -> Trained:
    """Run a key of ``TUNED``. ``overrides`` replace settings by section.

    Raises:
        RuntimeError: it failed.
    """
    plan.output.mkdir(parents=True)
    config = plan.output / "streamrl.toml"
    config.write_text(tomli_w.dumps(settings(variant, plan, overrides or {})))
    command = [sys.executable, "-W", "ignore", "-m", "streamrl.cli.app", "run", str(config)]
    launched = launch(command, {}, plan.cores, plan.limit_s, plan.output / "output.log")
    if launched.exit_code not in (0, None):
        raise RuntimeError(f"expected {variant} to train, got exit code {launched.exit_code}; see {plan.output}")
    steps = _steps(plan.output / RUN / "metrics.jsonl", launched.began)
    store = plan.output / RUN / "weights"
    versions = {int(folder.name.rpartition("-")[2]): folder for folder in store.iterdir() if folder.is_dir()}
    saved = [
        Saved(int(row["step"]), row["seconds"], versions[int(row["step"])])
        for row in steps
        if row["step"] in versions and (row["step"] % plan.save_every == 0 or row is steps[-1])
    ]
    return Trained(
        f"streamrl {variant}", plan.seed, tuple(saved), tuple(steps), launched.exit_code == 0, launched.cpu_seconds
    )


def settings(variant: str, plan: Plan, overrides: Settings) -> Settings:
    """The configuration file."""
    same = plan.hyperparameters
    tree: Settings = {
        "run": {"name": RUN, "directory": str(plan.output), "seed": plan.seed},
        "model": {"path": str(plan.policy)},
        "data": {"path": str(plan.prompts)},
        "rewards": {"functions": [plan.reward]},
        "loop": {
            "mode": variant.partition(",")[0],
            "groups_per_step": same.groups_per_step,
            "num_generations": same.num_generations,
            "max_prompt_length": same.max_prompt_length,
            "max_completion_length": same.max_completion_length,
            "temperature": same.temperature,
        },
        "generation": {"dtype": same.dtype},
        "algorithm": {
            "loss_type": same.loss_type,
            "scale_rewards": same.scale_rewards,
            "epsilon": same.epsilon,
            "epsilon_high": same.epsilon_high,
            "beta": same.beta,
        },
        "training": {
            "dtype": same.dtype,
            "max_steps": same.max_steps,
            "learning_rate": same.learning_rate,
            "adam_beta2": same.adam_beta2,
            "warmup_steps": same.warmup_steps,
            "max_grad_norm": same.max_grad_norm,
            "checkpoint_every": same.max_steps,
            "keep_weight_versions": KEPT,
        },
    }
    return merged(tree, TUNED[variant], plan.settings, overrides)


def _steps(metrics: Path, began: float) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [
        {"step": row["step"], "seconds": row["time"] - began}
        | {ours: row[theirs] for ours, theirs in MEASURES.items() if theirs in row}
        for row in rows
    ]


MEASURES = {
    "reward": "reward",
    "mean_length": "completions/mean_length",
    "max_length": "completions/max_length",
    "samples": "ledger/trained",
    "sampled_tokens": "completions/num_tokens",
    "trained_tokens": "tokens/computed",
    "staleness": "off_policy/mean",
    "waited_s": "time/wait_for_batch",
    "forward_backward_s": "time/forward_backward",
    "step_s": "time/step",
}
"""Our names of measures, and those of the run's metrics."""
