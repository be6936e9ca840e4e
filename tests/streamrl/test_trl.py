"""TRL's trainer fed from our stream: the contract of ``rollout_func``, and TRL itself by ``make test-long``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamrl.datasets import Example, example_of
from streamrl.schemas.errors import UserError
from streamrl.trl import MOST_OPEN, StreamedRollouts, complete_groups, reward_of, streamed_reward
from tests.consumers.training.factories import make_trajectory
from tests.pipeline.tiny_model import save_tiny_model

REQUIRED = {"prompt_ids", "completion_ids", "logprobs"}
"""Of TRL 1.x; every other field goes to the reward functions."""


def example(group: int, index: int, size: int = 2, **changes: Any) -> Example:
    made = make_trajectory(f"p/{group}/0", index, num_generations=size, reward=float(index), **changes)
    return example_of(made)


def fed(examples: list[Example], **options: Any) -> StreamedRollouts:
    rollouts = StreamedRollouts(**{"run": "run", "group": "trl", "num_generations": 2, "reward_weights": {}, **options})
    rollouts._examples = examples
    return rollouts


def test_whole_groups_come_in_the_shape_that_trl_wants() -> None:
    # Of three groups, interleaved; the second is whole first.
    rollouts = fed([example(0, 0), example(1, 1), example(1, 0), example(2, 0), example(0, 1), example(2, 1)])
    found = rollouts(["any"] * 4, trainer=None)
    assert found.keys() >= REQUIRED
    assert found["group_id"] == ["p/1/0", "p/1/0", "p/0/0", "p/0/0"]
    assert found["trajectory_id"] == ["p/1/0/0", "p/1/0/1", "p/0/0/0", "p/0/0/1"]
    assert all(len(column) == 4 for column in found.values())
    first = make_trajectory("p/1/0", 0)
    assert found["prompt_ids"][0] == first.prompt_token_ids.tolist()
    assert found["completion_ids"][0] == first.token_ids.tolist()
    assert found["logprobs"][0] == first.logprobs.tolist()
    assert found["version"] == ["1-0"] * 4
    # As TRL calls reward functions: completions, the data set's columns, and the other fields by name.
    extra = {name: column for name, column in found.items() if name not in REQUIRED}
    assert streamed_reward(prompts=["any"] * 4, completions=[""] * 4, **extra) == [0.0, 1.0, 0.0, 1.0]
    assert rollouts(["any"] * 2)["group_id"] == ["p/2/0", "p/2/0"]


def test_rewards_are_weighted_as_in_the_run_unless_weights_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path / "cache"))
    config = tmp_path / "run.toml"
    config.write_text(
        '[run]\nname = "weighted"\n[model]\npath = "m"\n[data]\npath = "p.jsonl"\n'
        '[rewards]\nfunctions = ["a:exact", "a:format"]\nweights = [1.0, 0.2]\n'
    )
    both = [example(0, index) | {"rewards": {"exact": 1.0, "format": 1.0}} for index in range(2)]
    options = {"run": config, "bootstrap_servers": "b:2", "reward_weights": None}
    assert fed(both, **options)(["any"] * 2)["streamed_reward"] == [1.2, 1.2]
    assert fed(both, **options | {"run": "elsewhere"})(["any"] * 2)["streamed_reward"] == [2.0, 2.0]
    own = {"exact": 0.5, "format": 0.0}
    assert fed(both, **options | {"reward_weights": own})(["any"] * 2)["streamed_reward"] == [0.5, 0.5]


def test_repeats_make_no_group_twice_and_what_cannot_be_trained_is_left_out() -> None:
    empty, unrewarded = example(1, 1, tokens=()), example(2, 1)
    unrewarded["rewards"] = {"exact": float("nan")}
    examples = [
        *(example(0, 0), example(0, 0), example(0, 1), example(0, 0), example(0, 1)),
        *(example(1, 0), empty),
        *(example(2, 0), unrewarded),
        *(example(3, 0), example(3, 1)),
    ]
    assert [group[0]["group_id"] for group in complete_groups(examples, 2)] == ["p/0/0", "p/3/0"]


def test_groups_that_never_become_whole_do_not_pile_up() -> None:
    def broken() -> Iterator[Example]:
        one = example(0, 0)
        for number in range(MOST_OPEN + 10):
            yield one | {"group_id": f"p/{number}/0", "trajectory_id": f"p/{number}/0/0"}
        # Of a group that was given up, and of one that was not.
        for number in (0, MOST_OPEN + 9):
            yield one | {"group_id": f"p/{number}/0", "trajectory_id": f"p/{number}/0/1"}

    assert [group[0]["group_id"] for group in complete_groups(broken(), 2)] == [f"p/{MOST_OPEN + 9}/0"]


def test_what_does_not_fit_together_is_one_line() -> None:
    with pytest.raises(UserError, match=r"expected a multiple of 2 completions per process.*got 3"):
        fed([])(["any"] * 3)
    with pytest.raises(UserError, match=r"expected groups of 4, got one of 2: set num_generations"):
        fed([example(0, 0)], num_generations=4)(["any"] * 4)


def test_rewards_are_weighted_and_summed_as_our_trainer_does() -> None:
    assert reward_of({"a": 1.0, "b": 0.5, "c": float("nan")}, {"b": 2.0, "c": 9.0}) == 2.0
    assert reward_of({"c": float("nan")}, {}) is None


@pytest.mark.long
def test_trl_trains_on_what_the_stream_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from transformers.trainer_utils import set_seed

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")  # it warns that rollout_func may yet change
    set_seed(0)
    policy = save_tiny_model(tmp_path / "policy")
    model = AutoModelForCausalLM.from_pretrained(policy)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    rollouts = fed([example(group, index) for group in range(8) for index in range(2)])
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=streamed_reward,
        rollout_func=rollouts,
        train_dataset=Dataset.from_list([{"prompt": "any"}] * 8),
        args=trl.GRPOConfig(
            output_dir=str(tmp_path / "out"),
            use_cpu=True,
            bf16=False,
            num_generations=2,
            per_device_train_batch_size=4,
            max_steps=2,
            learning_rate=1e-2,
            report_to=[],
            save_strategy="no",
        ),
    )
    trainer.train()
    assert trainer.state.global_step == 2
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    assert rewards == [0.5] * len(rewards) != []
    assert any(not before[name].equal(tensor) for name, tensor in model.named_parameters())
