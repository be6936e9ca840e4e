"""TRL's GRPOTrainer on the samples of a StreamRL run: TRL trains its own model, and generates nothing.

    pip install trl
    python -m examples.trl_stream [DIRECTORY]

A short run makes the samples. Its broker stays, so that TRL can read them afterwards. TRL can also read during a run,
on any machine that reaches the broker: then it waits for samples, and does not affect the run.
"""

import importlib.util
import json
import sys
from pathlib import Path

import streamrl
from examples.scratch import working_directory

GROUP_SIZE = 4
RUN_STEPS, TRL_STEPS = 8, 4


def share_of_e(completions: list[str]) -> list[float]:
    """The share of a completion's characters that are the letter e."""
    return [text.count("e") / max(1, len(text)) for text in completions]


def make_samples(directory: Path, model: Path, bootstrap_servers: str) -> streamrl.Run:
    """Train with StreamRL for a few steps; its trajectories stay in the broker's topics."""
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {number}"}) + "\n" for number in range(100)))
    return streamrl.run(
        {
            "run": {"name": "for-trl", "directory": str(directory), "workers": 1},
            "model": {"path": str(model)},
            "data": {"path": str(prompts)},
            "rewards": {"functions": ["examples.trl_stream:share_of_e"]},
            "loop": {"groups_per_step": 4, "num_generations": GROUP_SIZE, "max_completion_length": 16},
            "generation": {"max_num_seqs": 16},
            "training": {"max_steps": RUN_STEPS, "threads": 1},
            "kafka": {"bootstrap_servers": bootstrap_servers},
        }
    )


def train_with_trl(directory: Path, model: Path, run: streamrl.Run) -> None:
    """Let TRL take a few steps on the run's groups."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from streamrl.trl import StreamedRollouts, streamed_reward

    # Starts at the oldest sample. Commits its position under the name `trl`, where a restarted trainer continues.
    rollouts = StreamedRollouts(run.directory, group="trl", num_generations=GROUP_SIZE)
    trainer = GRPOTrainer(
        model=str(model),  # any model with the run's tokenizer
        rollout_func=rollouts,
        reward_funcs=streamed_reward,  # the rewards that came with the samples
        train_dataset=Dataset.from_list([{"prompt": "-"}] * 1000),  # not used: sets only how long an epoch is
        args=GRPOConfig(
            output_dir=str(directory / "trl"),
            num_generations=GROUP_SIZE,
            per_device_train_batch_size=4 * GROUP_SIZE,
            max_steps=TRL_STEPS,
            learning_rate=1e-2,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
        ),
    )
    trainer.train()
    print("\nTRL's steps on the run's samples:")
    for row in trainer.state.log_history:
        if "reward" in row:
            print(f"  step {row['step']}  reward {row['reward']:.3f}  loss {row['loss']:+.4f}")


def main(directory: Path) -> None:
    """Start a broker, make samples with StreamRL, and train on them with TRL."""
    from examples.tiny_model import build
    from streamrl.bus.embedded.cluster import start_cluster

    model = build(directory / "model")
    with start_cluster(data_dir=directory / "kafka", progress=print) as cluster:
        run = make_samples(directory, model, cluster.bootstrap_servers)
        train_with_trl(directory, model, run)


if __name__ == "__main__":
    if importlib.util.find_spec("trl") is None:
        print("error: expected the package trl, which this example needs, got none: pip install trl", file=sys.stderr)
        sys.exit(2)
    with working_directory() as scratch:
        main(scratch)
