"""Your own algorithm: what a group of rewards is worth, and the loss of a token.

    python -m examples.own_loss [DIRECTORY]

The class changes two of the three functions of an algorithm and keeps the third. Batches, averages, exactly-once
training, checkpoints and replay stay as they are. The trainer imports it by its path, "examples.own_loss:RankedPolicy".
"""

import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

import streamrl
from examples.scratch import working_directory
from streamrl.consumers.algorithms.losses import TokenBatch
from streamrl.schemas.settings import Section

STEPS = 16


class RankedPolicy(streamrl.Algorithm):
    """Policy gradient on ranks: a reward counts by its place in the group, so an outlier weighs no more than the best.

    As some samples come from older weights, a token's gradient is weighted by the ratio pi/mu, up to `largest_weight`.
    """

    class Options(Section):
        """The keys of `algorithm.options`, which are checked when the run starts."""

        largest_weight: float = Field(default=2.0, ge=1)

    options: Options

    def advantages(self, rewards: NDArray[np.float64], usable: NDArray[np.bool_]) -> NDArray[np.float64]:
        """The advantages [G] of a group with rewards [G]: from -1 (worst) to 1 (best); equal rewards share a rank."""
        below = (rewards[:, None] > rewards[None, :]).sum(axis=1)
        above = (rewards[:, None] < rewards[None, :]).sum(axis=1)
        found: NDArray[np.float64] = (below - above) / max(1, len(rewards) - 1)
        return found

    def surrogate(self, tokens: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The losses of the tokens [B, S], and which were clipped [B, S]: 1 where the weight was cut, else 0.

        The loss is not averaged here: then it does not matter how StreamRL cuts a batch.
        """
        ratio = torch.exp(tokens.log_ratio).detach()  # pi/mu: the policy now, against the weights that sampled
        weight = ratio.clamp(max=self.options.largest_weight)
        losses = -weight * tokens.token_advantages * tokens.logprobs
        return losses, (ratio > weight).to(losses.dtype)


def share_of_e(completions: list[str]) -> list[float]:
    """The share of a completion's characters that are the letter e."""
    return [text.count("e") / max(1, len(text)) for text in completions]


def main(directory: Path) -> None:
    """Train for a few steps with the algorithm, then print what it did."""
    from examples.tiny_model import build

    model = build(directory / "model")
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {number}"}) + "\n" for number in range(100)))
    run = streamrl.run(
        {
            "run": {"name": "own-loss", "directory": str(directory), "workers": 1},
            "model": {"path": str(model)},
            "data": {"path": str(prompts)},
            "rewards": {"functions": ["examples.own_loss:share_of_e"]},
            "algorithm": {"name": "examples.own_loss:RankedPolicy", "options": {"largest_weight": 1.5}},
            # Four prompts a step, eight completions of each, from weights that are at most two steps old.
            "loop": {"groups_per_step": 4, "num_generations": 8, "max_staleness": 2, "max_completion_length": 16},
            "generation": {"max_num_seqs": 32},
            "training": {"max_steps": STEPS, "learning_rate": 1e-2, "threads": 1},
        }
    )

    print(f"\n{run.settings.algorithm.name}, step by step, in {run.directory}:")
    for row in run.metrics.to_pylist()[:: STEPS // 4]:
        cut = row["clip_ratio/high_mean"]
        print(f"  step {row['step']:2}  reward {row['reward']:.3f}  loss {row['loss']:+.4f}  weights cut {cut:.1%}")


if __name__ == "__main__":
    with working_directory() as scratch:
        main(scratch)
