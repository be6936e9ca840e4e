"""The demo as settings: the warm-started model, the task, and the numbers with which it learns best."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from bus.embedded.runtime import cache_root
from settings.loading import load_settings
from settings.tree import Settings
from streamrl.demo.task import DATASET, MAX_COMPLETION_TOKENS, OPTIONS, PROMPT_TEMPLATE
from streamrl.demo.warm_start import ensure_warm_started_model


def demo_settings(engine: str, seed: int, overrides: Sequence[str], progress: Callable[[str], None]) -> Settings:
    """Settings of one demo run; builds and warm-starts the model if the cache does not hold it.

    Raises:
        SettingsError: an override is wrong.
        ModelError: the model cannot be made.
    """
    model = ensure_warm_started_model(cache_root(), seed, progress)
    defaults = _defaults(engine, seed) | {"model": {"path": str(model)}}
    return load_settings(None, overrides, defaults)


def _defaults(engine: str, seed: int) -> dict[str, Any]:
    return {
        "run": {"name": f"demo-{engine}-seed{seed}-{time.strftime('%Y%m%d-%H%M%S')}", "seed": seed, "workers": 2},
        "data": {
            "dataset": DATASET,
            "options": OPTIONS,
            "filter": "streamrl.demo.task:is_training_entry",
            "prompt_template": PROMPT_TEMPLATE,
        },
        "rewards": {"functions": ["dataset", "streamrl.demo.task:exact_match"]},
        "loop": {
            "groups_per_step": 16,
            "num_generations": 8,
            "max_staleness": 3,
            "max_prompt_length": 64,
            "max_completion_length": MAX_COMPLETION_TOKENS,
            "bucket_boundaries": [6, 8, 10],
            "shards": 1,
        },
        "generation": {"engine": engine, "max_num_seqs": 64, "threads": 1},
        "algorithm": {"loss_type": "dapo", "scale_rewards": "none", "epsilon_high": 0.28, "dynamic_sampling": False},
        "batching": {"token_budget": 4096},
        "training": {
            "max_steps": 120,
            "learning_rate": 2e-4,
            "adam_beta2": 0.99,
            "warmup_steps": 5,
            "checkpoint_every": 40,
            "threads": 1,
        },
        "evaluation": {"function": "streamrl.demo.evaluation:evaluate_exact_match"},
    }
