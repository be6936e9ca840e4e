import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.producers.lengths.calibration import kendall_tau, recall_of_longest
from streamrl.producers.lengths.learned.model_updates import FitRules
from streamrl.producers.lengths.learned.predictor import LearnedLengths
from streamrl.producers.lengths.predictor import ObservedCompletion
from streamrl.producers.lengths.settings import LengthSettings
from streamrl.producers.lengths.startup import build_predictor
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import LengthEstimate, Prompt
from streamrl.settings.features import predictors
from tests.producers.lengths.learned.policy import prompt_of, teach, typical

LOOP = LoopSettings(max_completion_length=2000, bucket_boundaries=(64, 256))
SETTINGS = LengthSettings(predictor="learned")
RULES = FitRules(refit_every=1024, reservoir_size=2048)
NEW = range(10_000, 10_300)


@pytest.fixture(scope="module")
def taught() -> LearnedLengths:
    predictor = LearnedLengths(SETTINGS, LOOP, rules=RULES)
    teach(predictor, range(400))
    return predictor


def _scores(predictor: LearnedLengths, growth: float = 1.0) -> tuple[float, float, float]:
    """Recall of the longest, tau, and the share of prompts whose typical length is below the upper estimate."""
    prompts = [prompt_of(index) for index in NEW]
    estimates = [predictor.predict(prompt) for prompt in prompts]
    lengths = [growth * typical(prompt) for prompt in prompts]
    medians = [estimate.median for estimate in estimates]
    covered = np.mean([length <= estimate.upper for length, estimate in zip(lengths, estimates, strict=True)])
    recall, tau = recall_of_longest(medians, lengths), kendall_tau(medians, lengths)
    assert recall is not None
    assert tau is not None
    return recall, tau, float(covered)


def test_the_setting_chooses_it() -> None:
    assert isinstance(build_predictor(SETTINGS, LOOP, others=predictors()), LearnedLengths)


def test_until_there_is_enough_the_observed_quantiles_answer() -> None:
    predictor = LearnedLengths(SETTINGS, LOOP, rules=RULES)
    assert predictor.predict(prompt_of(0)).predictor == "observed_quantiles/prior"
    teach(predictor, range(60))
    assert predictor.predict(prompt_of(0)).predictor.startswith("observed_quantiles/")
    teach(predictor, range(60, 70))
    assert predictor.predict(prompt_of(0)).predictor == "learned/v1"
    other = Prompt(prompt_id="x", dataset="never seen", content="?")
    assert predictor.predict(other).predictor.startswith("observed_quantiles/")


def test_new_prompts_are_ordered_by_what_they_ask_for(taught: LearnedLengths) -> None:
    recall, tau, covered = _scores(taught)
    assert recall > 0.85
    assert tau > 0.8
    assert covered > 0.9
    assert taught.failures == 0


@settings(max_examples=60, deadline=None)
@given(content=st.text(max_size=300), dataset=st.sampled_from(["sort", "spell", "other"]))
def test_any_prompt_gets_an_estimate_within_the_limits(taught: LearnedLengths, content: str, dataset: str) -> None:
    estimate = taught.predict(Prompt(prompt_id="p", dataset=dataset, content=content))
    assert 1 <= estimate.median <= estimate.upper <= LOOP.max_completion_length
    assert estimate.bucket == LOOP.bucket_of(estimate.upper)
    assert taught.failures == 0


def test_a_prompt_that_repeats_is_known_by_its_own_lengths() -> None:
    """The same text throughout: only the history tells which prompts are long."""
    predictor = LearnedLengths(SETTINGS, LOOP, rules=RULES)
    for data_pass in range(4):
        for index in random.Random(data_pass).sample(range(100), 100):
            prompt = Prompt(prompt_id=f"same/{index}", dataset="same", content="Think.")
            for sample in range(4):
                length = 50 + 10 * index + sample
                predictor.observe(ObservedCompletion(prompt, f"{index}/{data_pass}", length, version=data_pass))
                predictor.wait()
    medians = [
        predictor.predict(Prompt(prompt_id=f"same/{index}", dataset="same", content="Think.")).median
        for index in range(100)
    ]
    tau = kendall_tau(medians, list(range(100)))
    assert tau is not None
    assert tau > 0.8


def test_when_the_policy_changes_the_estimates_follow() -> None:
    predictor = LearnedLengths(SETTINGS, LOOP, rules=RULES)
    teach(predictor, range(300))
    version = predictor.model.version if predictor.model is not None else 0
    before = _scores(predictor, growth=2.0)[2]
    teach(predictor, range(300, 700), growth=2.0, version=5)
    recall, tau, covered = _scores(predictor, growth=2.0)
    assert before < 0.5 < 0.85 < covered
    assert min(recall, tau) > 0.75
    assert predictor.model is not None
    assert predictor.model.version > version
    assert predictor.model.policy_version == 5


def test_a_limit_that_cuts_completions_off_bounds_the_estimates_and_keeps_the_rest_right() -> None:
    predictor = LearnedLengths(SETTINGS, LOOP.model_copy(update={"max_completion_length": 300}), rules=RULES)
    teach(predictor, range(400), limit=300)
    estimates = {index: predictor.predict(prompt_of(index)) for index in NEW}
    long = [e.median for index, e in estimates.items() if typical(prompt_of(index)) > 500]
    short = {index: e.median for index, e in estimates.items() if 100 < typical(prompt_of(index)) < 200}
    assert np.median(long) == pytest.approx(300, abs=15)
    assert np.median([m / typical(prompt_of(index)) for index, m in short.items()]) == pytest.approx(1, abs=0.25)


def test_a_restart_goes_on_with_the_saved_model(tmp_path: Path) -> None:
    kept = SETTINGS.model_copy(update={"model_dir": tmp_path})
    first = LearnedLengths(kept, LOOP, rules=RULES)
    teach(first, range(200))
    again = LearnedLengths(kept, LOOP, rules=RULES)
    assert first.model is not None
    assert again.model is not None
    assert again.model.version == first.model.version
    assert again.predict(prompt_of(9_999)).predictor == f"learned/v{again.model.version}"
    assert _scores(again)[0] > 0.8
    teach(again, range(200, 300))
    assert again.model.version > first.model.version


def test_a_group_is_described_before_its_completions(taught: LearnedLengths) -> None:
    """Samples of a group that is not whole do not change what the group was described as."""
    predictor = LearnedLengths(SETTINGS, LOOP, rules=RULES)
    prompt = prompt_of(0)
    for length in (10, 500, 1000):
        predictor.observe(ObservedCompletion(prompt, "g/0", length))
    rows = predictor._updater.reservoir.snapshot(predictor._levels).rows  # type: ignore[union-attr]
    assert len(rows) == 3
    assert (rows == rows[0]).all()


def test_completions_are_learned_in_request_order() -> None:
    """While the longest of a batch are missing, the others do not pass for all of it."""
    told = []
    for key in (lambda completion: completion.group_id, lambda completion: completion.length):
        predictor = LearnedLengths(SETTINGS, LOOP, rules=RULES)
        prompts = [prompt_of(index) for index in range(1200)]
        for number, prompt in enumerate(prompts):
            predictor.predict(prompt, f"{number:04d}")
        ended = [
            ObservedCompletion(prompt, f"{number:04d}", length)
            for number, prompt in enumerate(prompts)
            for length in [round(typical(prompt))] * LOOP.num_generations
        ]
        for completion in sorted(ended, key=key)[: len(ended) * 19 // 20]:
            predictor.observe(completion)
            predictor.wait()
        told.append([predictor.predict(prompt_of(index)).median for index in NEW])
    in_order, short_first = np.log(told)
    assert abs((in_order - short_first).mean()) < 0.25


class _Broken(dict[str, float]):
    def __getattr__(self, name: str) -> None:
        raise RuntimeError(f"no {name} today")


def test_estimates_are_advice_only(tmp_path: Path) -> None:
    """A model, a memory and a folder that all fail: every question is answered, and the failures are counted."""
    (tmp_path / "file").write_text("")
    predictor = LearnedLengths(SETTINGS.model_copy(update={"model_dir": tmp_path / "file"}), LOOP, rules=RULES)
    teach(predictor, range(100))
    assert predictor.failures == 1
    assert predictor.predict(prompt_of(1)).predictor.startswith("learned/")
    predictor._levels = _Broken()  # type: ignore[assignment]
    assert isinstance(predictor.predict(prompt_of(1)), LengthEstimate)
    predictor.observe(ObservedCompletion(prompt_of(1), "g", 10))
    assert predictor.predict(prompt_of(1)).predictor.startswith("observed_quantiles/")
    assert predictor.failures == 4


def test_a_lost_folder_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    predictor = LearnedLengths(SETTINGS.model_copy(update={"model_dir": folder}), LOOP, rules=RULES)
    teach(predictor, range(70))
    shutil.rmtree(folder)
    teach(predictor, range(70, 200))
    assert {path.name.partition("-")[0] for path in folder.iterdir()} == {"trees"}
    assert predictor.failures == 0
