"""The demo's settings: the warm-started model, the task, and the values with which it learns best."""

import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

from streamrl.bus.embedded.runtime import cache_root
from streamrl.demo.evaluation import EVALUATION
from streamrl.demo.task import ANSWER_PATTERN, BUCKET_BOUNDARIES, MAX_COMPLETION_TOKENS, MAX_PROMPT_TOKENS
from streamrl.demo.warm_start import PROMPTS, ensure_warm_started_model, model_directory
from streamrl.settings.loading import load_settings
from streamrl.settings.tree import Settings


def demo_settings(engine: str, seed: int, overrides: Sequence[str], progress: Callable[[str], None]) -> Settings:
    """Settings of one demo run; builds and warm-starts the model if the cache does not hold it.

    Raises:
        SettingsError: an override is wrong.
        ModelError: the model cannot be built.
    """
    model = model_directory(cache_root(), seed)
    recipe = defaults(engine, seed)
    recipe["run"]["name"] = f"demo-{engine}-seed{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    recipe |= {"model": {"path": str(model)}, "data": {"path": str(model / PROMPTS)}}
    settings = load_settings(None, overrides, recipe)  # first, so that a wrong override is reported at once
    ensure_warm_started_model(cache_root(), seed, progress)
    return settings


def defaults(engine: str, seed: int) -> dict[str, Any]:
    """The demo's settings by section, without run name, model and prompts."""
    # Most of vLLM's decode step on a CPU costs the same for one sequence as for a hundred. Two workers with half the
    # slots would pay that twice: 60 steps took 43 s with one worker and 53 s with two.
    workers, slots = (1, 192) if engine == "vllm" else (2, 64)
    return {
        "run": {"seed": seed, "workers": workers},
        "rewards": {
            "functions": ["exact_match", "streamrl.demo.task:worked_out"],
            "weights": [1.0, 0.0],  # only the answer counts
            "answer_pattern": ANSWER_PATTERN,
        },
        "loop": {
            "groups_per_step": 16,
            "num_generations": 8,
            "max_staleness": 3,
            "max_prompt_length": MAX_PROMPT_TOKENS,
            "max_completion_length": MAX_COMPLETION_TOKENS,
            "bucket_boundaries": list(BUCKET_BOUNDARIES),
        },
        "generation": {"engine": engine, "max_num_seqs": slots, "threads": 1, "dtype": "float32"},
        "algorithm": {"loss_type": "dapo", "scale_rewards": "none", "epsilon_high": 0.28, "dynamic_sampling": False},
        "batching": {"token_budget": 4096},
        "training": {
            # By step 60 the style has shifted; after that the working itself improves, which it did not at 2e-4.
            "max_steps": 240,
            "learning_rate": 1e-4,
            "adam_beta2": 0.99,
            "warmup_steps": 5,
            "checkpoint_every": 40,
            "threads": 1,
            # A group's answers have many first tokens in common. A GPU would compile this attention first.
            "packing": "padded" if shutil.which("nvidia-smi") else "shared",
            # On a GPU as well, so that results are comparable with those of other machines.
            "dtype": "float32",
            "gradient_checkpointing": False,
        },
        "evaluation": {"function": EVALUATION},
    }
