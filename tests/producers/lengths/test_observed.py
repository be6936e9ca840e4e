import random

from streamrl.producers.lengths.buckets import RecentLengths
from streamrl.producers.lengths.predictor import ObservedCompletion, ObservedQuantiles
from streamrl.producers.lengths.settings import LengthSettings
from streamrl.producers.lengths.startup import build_predictor
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import Prompt

LOOP = LoopSettings(max_completion_length=1000, bucket_boundaries=(64, 256))


def _prompt(dataset: str = "a", length: int = 10) -> Prompt:
    return Prompt(prompt_id="p", dataset=dataset, content="x" * length)


def _completion(prompt_length: int, output_length: int) -> ObservedCompletion:
    return ObservedCompletion(_prompt("a", prompt_length), "p/0", output_length)


def test_the_prior_holds_before_anything_is_seen() -> None:
    estimate = ObservedQuantiles(LOOP, min_observations=4).predict(_prompt())
    assert (estimate.median, estimate.upper, estimate.bucket) == (500, 500, 2)
    assert estimate.predictor.endswith("/prior")


def test_the_narrowest_class_seen_often_enough_is_used() -> None:
    predictor = ObservedQuantiles(LOOP, min_observations=4)
    for _ in range(4):
        predictor.observe(_completion(10, 20))
    for _ in range(4):
        predictor.observe(_completion(500, 400))
    used = {
        name: predictor.predict(prompt)
        for name, prompt in {
            "prompt_length": _prompt("a", 10),
            "dataset": _prompt("a", 100),
            "all": _prompt("b", 12),
        }.items()
    }
    assert all(estimate.predictor.endswith(f"/{name}") for name, estimate in used.items())
    assert (used["prompt_length"].upper, used["dataset"].upper, used["all"].upper) == (20, 400, 400)


def test_a_long_instruction_does_not_hide_the_length_of_a_word() -> None:
    predictor = ObservedQuantiles(LOOP, min_observations=4)
    for length in range(52, 60):
        for _ in range(4):
            predictor.observe(_completion(length, length - 48))
    estimates = [predictor.predict(_prompt("a", length)) for length in range(52, 60)]
    assert [estimate.median for estimate in estimates] == list(range(4, 12))


def test_lengths_of_long_prompts_fall_into_classes_of_about_two_percent() -> None:
    predictor = ObservedQuantiles(LOOP, min_observations=4)
    for _ in range(4):
        predictor.observe(_completion(4000, 7))
    assert predictor.predict(_prompt("a", 4010)).predictor.endswith("/prompt_length")
    assert not predictor.predict(_prompt("a", 4200)).predictor.endswith("/prompt_length")


def test_the_upper_estimate_covers_the_share_it_promises() -> None:
    predictor = ObservedQuantiles(LOOP, min_observations=4)
    rng = random.Random(1)
    lengths = [rng.randint(1, 900) for _ in range(100)]
    for length in lengths:
        predictor.observe(_completion(10, length))
    estimate = predictor.predict(_prompt())
    assert sum(length <= estimate.upper for length in lengths) == 90
    assert sum(length <= estimate.median for length in lengths) == 50


def test_the_bucket_is_that_of_the_upper_estimate() -> None:
    predictor = ObservedQuantiles(LOOP, min_observations=4)
    for length in (10, 10, 10, 300):
        predictor.observe(_completion(10, length))
    estimate = predictor.predict(_prompt())
    assert (estimate.median, estimate.bucket) == (10, 2)


def test_old_lengths_are_forgotten() -> None:
    recent = RecentLengths(3)
    for length in (900, 900, 1, 2, 3):
        recent.observe(length)
    assert (len(recent), recent.quantile(0.99), recent.quantile(0.01)) == (3, 3, 1)


def test_the_longest_fifth_ranks_from_four_fifths_on() -> None:
    recent = RecentLengths(100)
    assert recent.rank(5) == 0.5
    for length in range(1, 101):
        recent.observe(length)
    assert [length for length in range(1, 101) if recent.rank(length) >= 0.8] == list(range(81, 101))
    assert (recent.rank(0), recent.rank(1000)) == (0.0, 1.0)


def test_estimates_stay_between_one_token_and_the_limit() -> None:
    predictor = ObservedQuantiles(LOOP, min_observations=4)
    for length in (0, 0, 5000, 5000):
        predictor.observe(_completion(10, length))
    estimate = predictor.predict(_prompt())
    assert (estimate.median, estimate.upper) == (1, 1000)


def test_the_constant_predictor_never_learns() -> None:
    predictor = build_predictor(LengthSettings(predictor="constant"), LOOP)
    before = predictor.predict(_prompt())
    for _ in range(50):
        predictor.observe(_completion(10, 7))
    assert predictor.predict(_prompt()) == before
    assert isinstance(build_predictor(LengthSettings(), LOOP), ObservedQuantiles)
