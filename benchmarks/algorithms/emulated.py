"""An emulated run by the clock.

Two workers decode as their curve says and training takes its time on a device that is emulated too; processes, broker,
topics and the trainers' loops are real. At time scale 1: emulated seconds are seconds.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.algorithms.streams import NEVER, Stream, running
from streamrl.settings.loading import validated

WORKERS, SLOTS = 2, 16
STEP_S = 0.005
"""Of a decode step, however many decode."""
TOKENS_PER_S = WORKERS * SLOTS / STEP_S
GROUPS, SAMPLES = 8, 4
"""Of an optimizer step: some 6,000 tokens, one second of both workers."""
MEDIAN_TOKENS, P99_OVER_MEDIAN, MOST_TOKENS = 160.0, 3.0, 1000
TRAIN_RATIO = 0.5
"""Training time of a token, of its generation time: workers are the slower side, and late consumers catch up."""
CHUNK_TOKENS = 20
HEARTBEAT_TIMEOUT_S = 4.0
"""So that workers send heartbeats every half second."""
PROMPTS = 20_000
WORKLOAD = (
    f"{WORKERS} workers of {SLOTS} slots, {TOKENS_PER_S:,.0f} tokens/s by their curve; steps of {GROUPS} groups of "
    f"{SAMPLES}; lengths lognormal, median {MEDIAN_TOKENS:.0f}, p99 {P99_OVER_MEDIAN:g} times that; training takes "
    f"{TRAIN_RATIO:g} of the generation time"
)


def settings_tree(
    name: str, folder: Path, address: str, algorithm: str, steps: int, seed: int, max_staleness: int = 4
) -> dict[str, Any]:
    """Of a run over ``folder/prompts.jsonl`` on a broker that is there."""
    return {
        "run": {"name": name, "directory": str(folder), "workers": WORKERS, "seed": seed},
        "kafka": {"bootstrap_servers": address},
        "data": {"path": str(folder / "prompts.jsonl")},
        "loop": {
            "groups_per_step": GROUPS,
            "num_generations": SAMPLES,
            "max_staleness": max_staleness,
            "max_completion_length": MOST_TOKENS,
            "bucket_boundaries": [MOST_TOKENS // 4],
            "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S,
        },
        "algorithm": {"name": algorithm, "dynamic_sampling": False},
        "generation": {"engine": "emulated", "max_num_seqs": SLOTS},
        "training": {"backend": "emulated", "max_steps": steps, "checkpoint_every": NEVER},
        "emulation": {
            "time_scale": 1.0,
            "decode": {"table": [[1, STEP_S]], "chunk_tokens": CHUNK_TOKENS},
            "lengths": {
                "source": "lognormal",
                "seed": seed,
                "median_tokens": MEDIAN_TOKENS,
                "p99_over_median": P99_OVER_MEDIAN,
                "max_tokens": MOST_TOKENS,
            },
            "training": {
                "forward_backward_s_per_token": TRAIN_RATIO / TOKENS_PER_S,
                "optimizer_step_s": 0.02,
                "export_s": 0.02,
            },
        },
    }


@contextmanager
def stream(
    folder: Path, address: str, name: str, algorithm: str, steps: int, seed: int, max_staleness: int = 4
) -> Iterator[Stream]:
    """A run that has been started; run and instances are ended with the block."""
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        prompts.write_text("".join(json.dumps({"prompt": f"question {number}"}) + "\n" for number in range(PROMPTS)))
    tree = settings_tree(name, folder, address, algorithm, steps, seed, max_staleness)
    with running(folder, name, validated(tree)) as started:
        yield started
