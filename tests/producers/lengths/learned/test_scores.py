import pytest

from streamrl.producers.lengths.learned.offline import PredictedLength, baselines, score


def test_recall_tau_and_coverage_are_given_by_data_set_and_over_all() -> None:
    guesses = [PredictedLength("ab"[length % 2], length, length + 10, length) for length in range(1, 201)]
    judged = score(guesses)
    assert set(judged) == {"all", "a", "b"}
    assert judged["all"].recall == (1.0, 1.0, 1.0)
    assert (judged["a"].tau, judged["b"].coverage, judged["all"].completions) == (1.0, 1.0, 200)
    assert score([]) == {}


def test_baselines_predict_quantiles_of_the_training_lengths() -> None:
    taught = {"a": list(range(1, 101)), "b": [1000] * 100}
    said = baselines(taught, [("a", 5), ("b", 1000), ("new", 7)], 0.9)
    assert [(guess.median, guess.upper) for guess in said["per_dataset"]] == [(50, 90), (1000, 1000), (100, 1000)]
    assert {(guess.median, guess.upper) for guess in said["constant"]} == {(100, 1000)}
    judged = score(said["constant"])["all"]
    assert judged.fields()["coverage"] == pytest.approx(1.0)
