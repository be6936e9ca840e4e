from pathlib import Path
from typing import Literal

import pytest
import torch

from streamrl.producers.lengths.calibration import kendall_tau
from streamrl.producers.lengths.learned.language_model import (
    MAX_TOKENS,
    FineTuning,
    LengthRegressor,
    make_training_set,
    open_regressor,
    train,
)
from streamrl.producers.lengths.predictor import ObservedCompletion
from streamrl.schemas.errors import ModelError
from tests.producers.lengths.learned.policy import prompt_of, typical
from tests.producers.lengths.learned.tiny import save_tiny

torch.set_num_threads(1)
COMPLETIONS = [
    ObservedCompletion(prompt, f"{index}/0", round(typical(prompt) * (0.8 + 0.1 * sample)))
    for index in range(150)
    for prompt in [prompt_of(index, dataset="spell")]
    for sample in range(4)
]


def _scores(regressor: LengthRegressor) -> tuple[float, list[tuple[float, float]]]:
    prompts = [prompt_of(index, dataset="spell") for index in range(1000, 1100)]
    scored = regressor.score([prompt.text for prompt in prompts])
    tau = kendall_tau([median for median, _ in scored], [typical(prompt) for prompt in prompts])
    assert tau is not None
    return tau, scored


@pytest.mark.parametrize("kind", ["causal", "encoder"])
def test_any_model_learns_which_prompts_are_long(tmp_path: Path, kind: Literal["causal", "encoder"]) -> None:
    regressor = open_regressor(save_tiny(tmp_path, kind))
    examples = make_training_set(COMPLETIONS)
    before = train(regressor, examples, 0.9, FineTuning(epochs=0.1))
    after = train(regressor, examples, 0.9, FineTuning(epochs=8))
    tau, scored = _scores(regressor)
    assert after < before
    assert tau > 0.6
    assert all(median < upper for median, upper in scored)


def test_a_saved_network_scores_the_same(tmp_path: Path) -> None:
    regressor = open_regressor(save_tiny(tmp_path / "base"))
    train(regressor, make_training_set(COMPLETIONS), 0.9, FineTuning(epochs=0.2))
    (tmp_path / "saved").mkdir()
    regressor.save(tmp_path / "saved")
    loaded = open_regressor(tmp_path / "saved")
    for text in ("abc", "a"):
        assert loaded.score([text])[0] == pytest.approx(regressor.score([text])[0])
    assert {path.suffix for path in (tmp_path / "saved").iterdir()} <= {".json", ".safetensors", ".jinja", ".txt"}


def test_padding_does_not_change_a_score(tmp_path: Path) -> None:
    regressor = open_regressor(save_tiny(tmp_path))
    alone = [regressor.score([text])[0] for text in ("ab", "abc" * 20, "")]
    together = regressor.score(["ab", "abc" * 20, ""])
    assert [x for pair in together for x in pair] == pytest.approx([x for pair in alone for x in pair], abs=1e-5)


def test_the_beginning_and_the_end_of_a_very_long_prompt_are_read(tmp_path: Path) -> None:
    regressor = open_regressor(save_tiny(tmp_path))
    first, last = "a" * MAX_TOKENS, "b" * MAX_TOKENS
    (ids,) = regressor.encoded([first + last])
    assert len(ids) <= MAX_TOKENS
    assert ids[0] != ids[-1]


def test_the_same_examples_gives_the_same_model_and_leaves_others_random_numbers_alone(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    torch.manual_seed(5)
    expected = torch.rand(1)
    scores = []
    for _ in range(2):
        torch.manual_seed(5)
        regressor = open_regressor(tmp_path)
        train(regressor, make_training_set(COMPLETIONS), 0.9, FineTuning(epochs=0.2))
        assert torch.equal(torch.rand(1), expected)
        scores.append(regressor.score(["abc"]))
    assert scores[0] == scores[1]


def test_training_ends_when_its_seconds_are_over_or_it_is_stopped(tmp_path: Path) -> None:
    regressor = open_regressor(save_tiny(tmp_path))
    examples = make_training_set(COMPLETIONS)
    train(regressor, examples, 0.9, FineTuning(epochs=1e9, seconds=0.2))
    train(regressor, examples, 0.9, FineTuning(epochs=1e9), lambda: True)
    train(regressor, make_training_set([]), 0.9, FineTuning())


def test_a_place_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        open_regressor(tmp_path / "nowhere")
