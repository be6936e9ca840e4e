"""Your own reward: two functions with weights, which read columns of the prompts.

    python -m examples.own_reward [DIRECTORY]

A reward function has the signature that TRL uses: lists go in, one number for each completion comes out. Each function
runs in a process of its own, which imports it by its path (here "examples.own_reward:share_of_letter"). It gets the
keyword arguments that it names: `completions`, `prompts`, and any column of the data.
"""

import json
from pathlib import Path

import streamrl
from examples.scratch import working_directory

STEPS = 16


def share_of_letter(completions: list[str], letter: list[str]) -> list[float]:
    """The share of a completion's characters that are the letter in the column `letter`."""
    return [text.count(wanted) / max(1, len(text)) for text, wanted in zip(completions, letter, strict=True)]


def short(completions: list[str], longest: list[int]) -> list[float]:
    """1 for an empty completion, 0 for one with as many characters as the column `longest` says."""
    return [1 - min(len(text), limit) / limit for text, limit in zip(completions, longest, strict=True)]


def main(directory: Path) -> None:
    """Train for a few steps, then print each reward before and after, and whether every completion is accounted for."""
    # Imported here, because the process of each reward function imports this file too and needs neither.
    from examples.tiny_model import build
    from streamrl.inspection.audit.command import headline

    model = build(directory / "model")
    prompts = directory / "prompts.jsonl"
    rows = [{"prompt": f"say {number}", "letter": "e", "longest": 16} for number in range(100)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    # Starts the broker and every role as a process, and returns when the last step is taken. A TOML file with the same
    # sections, given to `streamrl run`, does the same.
    run = streamrl.run(
        {
            "run": {"name": "own-reward", "directory": str(directory), "workers": 1},
            "model": {"path": str(model)},
            "data": {"path": str(prompts)},
            "rewards": {
                "functions": ["examples.own_reward:share_of_letter", "examples.own_reward:short"],
                "weights": [1.0, 0.1],  # the total reward is the weighted sum
            },
            # Four prompts a step, eight completions of each, from weights that are at most two steps old.
            "loop": {"groups_per_step": 4, "num_generations": 8, "max_staleness": 2, "max_completion_length": 16},
            "generation": {"max_num_seqs": 32},
            "training": {"max_steps": STEPS, "learning_rate": 1e-2, "threads": 1},
        }
    )

    print(f"\nmean rewards of the first and the last step, by function, in {run.directory}:")
    first, *_, last = run.metrics.to_pylist()
    for name in ("share_of_letter", "short"):
        print(f"  {name}: {first[f'rewards/{name}/mean']:.3f} -> {last[f'rewards/{name}/mean']:.3f}")
    print(headline(run.audit()))  # the first line of `streamrl audit`


if __name__ == "__main__":
    with working_directory() as scratch:
        main(scratch)
