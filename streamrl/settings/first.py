"""The settings that people change, grouped by purpose. All others are advanced: most runs keep their defaults.

It loads no heavy module, because `streamrl run --help` prints this list.
"""

from collections.abc import Iterator, Mapping

FIRST: Mapping[str, Mapping[str, str]] = {
    "How long": {
        "training.max_steps": "optimizer steps in the run",
        "training.checkpoint_every": "steps between checkpoints",
    },
    "How fast": {
        "run.workers": "generation workers",
        "generation.engine": "transformers, vllm or emulated",
        "generation.max_num_seqs": "completions sampled at once by a worker",
        "generation.tensor_parallel_size": "devices of one model in a worker",
        "generation.gpu_memory_utilization": "vLLM's share of a GPU's memory",
        "batching.token_budget": "most tokens of a micro-batch",
        "training.ranks": "devices of the trainer",
        "training.dtype": "float32 or bfloat16",
        "training.gradient_checkpointing": "less memory, more computation",
    },
    "How fresh": {
        "loop.mode": "how far sampling may run ahead of training",
        "loop.max_staleness": "maximum age of a trained token in steps",
        "generation.adopt": "when a worker takes new weights",
    },
    "How big": {
        "loop.groups_per_step": "prompts in one step",
        "loop.num_generations": "completions of one prompt",
        "loop.max_prompt_length": "tokens of the longest prompt",
        "loop.max_completion_length": "most tokens of a completion",
    },
    "What to learn": {
        "model.path": "the model to start from",
        "data.path": "stored prompts: a file, a directory or a hub id",
        "data.dataset": "or generated prompts, from reasoning-gym",
        "data.system_prompt": "system turn before every prompt",
        "rewards.functions": "functions that score completions",
        "rewards.weights": "one weight for each function",
        "algorithm.name": "grpo, dapo, rloo, ppo, dpo ..., or your own",
        "algorithm.beta": "weight of the KL to the initial model",
        "training.learning_rate": "peak learning rate",
        "training.lr_schedule": "constant, linear or cosine",
        "training.warmup_steps": "steps of linear warm-up",
        "training.lora.rank": "rank of LoRA adapters; 0: all weights",
        "loop.temperature": "sampling temperature",
        "run.seed": "seed of prompts, sampling and training",
    },
    "Where": {
        "run.name": "name of the run",
        "run.directory": "directory that holds the runs",
        "kafka.bootstrap_servers": "the broker; unset: one of the run's own",
        "placement.trainer": "devices of the trainer",
        "placement.workers": "devices of each worker",
        "training.checkpoint_location": "directory or URL for checkpoints",
        "metrics.port": "first port of Prometheus endpoints; 0: none",
        "tracking.to": "experiment trackers",
    },
}
"""What one wants, and the settings for it with short meanings: at most forty, of features that every tree has."""


def first_keys() -> Iterator[str]:
    """The keys of all these settings."""
    for keys in FIRST.values():
        yield from keys


def overview() -> list[str]:
    """The list as lines for a terminal."""
    width = max(map(len, first_keys()))
    lines = []
    for want, keys in FIRST.items():
        lines += [want, *(f"  {key:<{width}}  {meaning}" for key, meaning in keys.items()), ""]
    return [*lines, "`streamrl config explain KEY` explains one of them, or any other; `... SECTION` lists a section"]
