"""``python -m benchmarks.ranks``: a trainer over 1, 2, 4 and 8 ranks against one without.

- ``throughput_ratio``: trajectories a second over those of one rank, of an emulated pipeline in virtual time whose
  trainer is the slower side: the product's own dispatcher, workers, batcher and dealing; only a micro-batch's seconds
  are those of a cost model. Padding costs what tokens cost, and each micro-batch something by itself.
- ``uneven_cost``: the share of throughput that is lost when completions come from few workers of unequal speed, which
  together are only so much faster than the trainer, instead of from workers that have everything at once.
- ``largest_gradient_difference``: ||a - b|| / ||a|| of the tensor that differs most between the gradients of one rank
  and of several, of a million parameters in float32 on the CPU (gloo), over micro-batches of unequal lengths.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.conditions import conditions
from benchmarks.small_model import VOCABULARY, build, save
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.batching.micro_batches import MicroBatch
from streamrl.consumers.training.checkpoints.shards import PiecedTensors
from streamrl.consumers.training.checkpoints.storage import open_storage
from streamrl.consumers.training.policy import PolicyPaths, TrainedPolicy
from streamrl.consumers.training.ranks.policy import RankedPolicy
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.planning.prediction import Prediction, summed_up
from streamrl.planning.simulation import SimulatedPipeline
from streamrl.schemas.reports import RecordRef
from streamrl.settings.loading import validated
from streamrl.settings.tree import Settings

RESULTS = Path(__file__).parent / "results" / "ranks.json"
RANKS = (1, 2, 4, 8)
GLOO_RANKS = (1, 2, 4)
STEPS = 10
TRAINED_S_PER_TOKEN = 1e-4
BUDGET = 4096
LAUNCH_S = 0.02 * BUDGET * TRAINED_S_PER_TOKEN
"""Of each micro-batch: a fiftieth of what a full one takes."""
HEADROOM = 1.25
"""How much faster than the trainer the uneven workers are together."""
SLOTS, STEP_S = 16, 0.01


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="of an emulated run")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="streamrl-ranks-") as scratch:
        model = save(build(512), Path(scratch) / "model")
        gradients = {ranks: gradients_over(ranks, model, Path(scratch) / str(ranks)) for ranks in GLOO_RANKS}
    alone = trained(1, uneven=False, steps=options.steps)
    rows = []
    for ranks in RANKS:
        even, uneven = (trained(ranks, uneven=uneven, steps=options.steps) for uneven in (False, True))
        rows.append(
            {
                "ranks": ranks,
                "throughput_ratio": round(even.trajectories_per_s / alone.trajectories_per_s, 3),
                "largest_gradient_difference": difference(gradients[1], gradients[ranks])
                if ranks in gradients
                else None,
                "uneven_cost": round(1 - uneven.trajectories_per_s / even.trajectories_per_s, 4),
                "trainer_busy": round(even.trainer_busy, 3),
                "uneven_trainer_busy": round(uneven.trainer_busy, 3),
            }
        )
    result = {"rows": rows, "conditions": conditions(began, 0, ["torch", "transformers"], "make bench-ranks")}
    options.results.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return result


def trained(ranks: int, *, uneven: bool, steps: int) -> Prediction:
    """An emulated run whose trainer has so many ranks, and workers to match."""
    settings, speeds = pipeline(ranks, uneven=uneven, steps=steps)
    return summed_up(SimulatedPipeline(settings, training_devices=ranks, worker_speeds=speeds).run(), settings)


def pipeline(ranks: int, *, uneven: bool, steps: int) -> tuple[Settings, tuple[float, ...]]:
    """Settings, and how fast each worker decodes."""
    workers = 2 * ranks if uneven else 4 * ranks
    # A worker's tokens a second at full slots; the trainer's, of completions alone. Uneven ones are 3 : 1.
    own = SLOTS / STEP_S
    wanted = HEADROOM * ranks / TRAINED_S_PER_TOKEN
    speed = wanted / own / workers if uneven else 20 * wanted / own / workers
    speeds = tuple(speed * (1.5 if number % 2 else 0.5) if uneven else speed for number in range(workers))
    settings = validated(
        {
            "run": {"workers": workers},
            "data": {"dataset": "chain_sum"},
            "loop": {
                "mode": "trajectory_async",
                "groups_per_step": 32,
                "num_generations": 8,
                "max_completion_length": 4000,
                "max_staleness": 4,
            },
            "lengths": {"predictor": "trace"},
            "dispatch": {"strategy": "lpt"},
            "generation": {"engine": "emulated", "max_num_seqs": SLOTS},
            "training": {"backend": "emulated", "max_steps": steps},
            "batching": {"token_budget": BUDGET},
            "emulation": {
                "time_scale": 1.0,
                "decode": {"step_s": STEP_S, "batch_scale": 1e9},
                "lengths": {"median_tokens": 300.0, "p99_over_median": 6.0, "max_tokens": 4000},
                "training": {
                    "forward_backward_s_per_token": TRAINED_S_PER_TOKEN,
                    "forward_backward_s_per_micro_batch": LAUNCH_S,
                    "padding_counts": True,
                },
            },
        }
    )
    return settings, speeds


def gradients_over(ranks: int, model: Path, root: Path) -> dict[str, torch.Tensor]:
    """The first step's gradient, up to a factor that is the same for all: AdamW's first moment after it."""
    paths = PolicyPaths(str(model), open_storage(root / "checkpoints", root / "cache"), root / "weights")
    training = TrainingSettings(ranks=ranks, threads=1, device="cpu", max_grad_norm=1e6)
    made_of = paths, AlgorithmSettings(), training, 256, None
    policy = TrainedPolicy(*made_of) if ranks == 1 else RankedPolicy(*made_of)
    try:
        for seed in range(3):
            policy.accumulate(unequal(11, seed))
        policy.finish_step(1.0)
        if not isinstance(policy, RankedPolicy):
            tensors = dict(policy.learner.optimizer_tensors())
        else:
            root.mkdir(parents=True)
            policy.write_parts(root)
            tensors = dict(PiecedTensors(sorted(root.glob("*.safetensors"))))
    finally:
        if isinstance(policy, RankedPolicy):
            policy.close()
    return {name: tensor for name, tensor in tensors.items() if name.endswith(".exp_avg")}


def unequal(rows: int, seed: int) -> MicroBatch:
    """Random sequences of 16 to 200 tokens, of which the last three quarters are trained."""
    chance = np.random.default_rng(seed)
    lengths = chance.integers(16, 200, rows)
    width = int(lengths.max())
    here = np.arange(width) < lengths[:, None]
    trained_here = here & (np.arange(width) >= (lengths // 4)[:, None])
    return MicroBatch(
        input_ids=np.where(here, chance.integers(2, VOCABULARY, (rows, width)), 0),
        loss_mask=trained_here.astype(np.float32),
        behaviour_logprobs=np.where(trained_here, -np.log(VOCABULARY), 0.0).astype(np.float32),
        advantages=chance.normal(size=rows).astype(np.float32),
        lengths=lengths.astype(np.int64),
        temperatures=np.ones(rows, dtype=np.float32),
        refs=tuple(RecordRef(f"p/{seed}/0/{row}", 0, row) for row in range(rows)),
    )


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """||a - b|| / ||a|| of the tensor that differs most."""
    gaps = [
        float(torch.linalg.vector_norm(one[name].double() - other[name].double()))
        / float(torch.linalg.vector_norm(one[name].double()))
        for name in one
    ]
    return float(f"{max(gaps):.2g}")


if __name__ == "__main__":
    main()
