"""The control: the demo's warm start, trained further on right solutions for a number of processor seconds.

A process of its own with one thread, which wastes none of them: ``python -m benchmarks.demo.control MODEL SEED SECONDS
OUT``.
"""

import json
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

from streamrl.demo.evaluation import evaluate
from streamrl.demo.warm_start import WarmStartRecipe, lessons, save, train_step

WARM_UP, DECAY = 0.02, 0.4
"""Shares of the time in which the learning rate rises, and falls at last; in between it is the warm start's."""


def main(model: str, seed: str, seconds: str, out: str) -> None:
    """Train, judge on the run's own held-out questions, and write what came of it as JSON."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    told = train(loaded, tokenizer, int(seed), float(seconds), WarmStartRecipe())
    with tempfile.TemporaryDirectory() as scratch:
        save(loaded, Path(scratch))
        told["metrics"] = evaluate(Path(scratch), int(seed))["metrics"]
    Path(out).write_text(json.dumps(told))


def train(model: Any, tokenizer: Any, seed: int, seconds: float, recipe: WarmStartRecipe) -> dict[str, Any]:
    """Optimizer steps on new lessons of the same kind until so much processor time is spent; how many, and of what."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, recipe.adam_beta2), weight_decay=0.0)
    # Another seed than the warm start's: it saw those lessons already.
    taught = lessons(f"control/{seed}", recipe.bare_share)
    steps, began, share = 0, time.process_time(), 0.0
    while share < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min(1.0, (share + 1e-3) / WARM_UP, (1.0 - share) / DECAY)
        train_step(model, optimizer, tokenizer, list(islice(taught, recipe.batch_size)), recipe.max_grad_norm)
        steps += 1
        share = (time.process_time() - began) / seconds
    return {"steps": steps, "solutions": steps * recipe.batch_size, "cpu_seconds": time.process_time() - began}


if __name__ == "__main__":
    main(*sys.argv[1:])
