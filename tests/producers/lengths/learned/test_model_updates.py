import shutil
import time
from dataclasses import replace
from pathlib import Path

from streamrl.producers.lengths.learned.model_updates import FitRules
from streamrl.producers.lengths.learned.predictor import LearnedLengths
from streamrl.producers.lengths.settings import LengthSettings
from streamrl.schemas.settings import LoopSettings
from tests.fakes.clock import FakeClock
from tests.producers.lengths.learned.policy import prompt_of, teach

LOOP = LoopSettings(max_completion_length=2000, bucket_boundaries=(64, 256))
FITTING = LengthSettings(predictor="learned")
RULES = FitRules(refit_every=1024, reservoir_size=2048)


def _pair(folder: Path) -> tuple[LearnedLengths, LearnedLengths, FakeClock]:
    """One that fits as a ranker does, and one that takes what it finds."""
    clock = FakeClock(0.0)
    taking = FITTING.model_copy(update={"refit": "process", "model_dir": folder})
    fitting = LearnedLengths(FITTING.model_copy(update={"model_dir": folder}), LOOP, rules=RULES)
    return fitting, LearnedLengths(taking, LOOP, clock=clock, rules=RULES), clock


def test_a_prediction_uses_one_model_and_a_newer_one_is_adopted_between_two(tmp_path: Path) -> None:
    fitting, taking, clock = _pair(tmp_path / "models")
    assert taking.predict(prompt_of(0)).predictor == "observed_quantiles/prior"
    teach(fitting, range(100))
    clock.now += 10
    taking.predict(prompt_of(0))
    taking.wait()
    assert fitting.model is not None
    assert taking.predict(prompt_of(0)).predictor == fitting.model.name
    assert abs(taking.predict(prompt_of(3)).median - fitting.predict(prompt_of(3)).median) < 30
    teach(fitting, range(100, 300))
    clock.now += 10
    taking.predict(prompt_of(0))
    taking.wait()
    assert taking.predict(prompt_of(0)).predictor == fitting.model.name != "learned/v1"


def test_the_folder_is_looked_at_every_few_seconds_at_most(tmp_path: Path) -> None:
    fitting, taking, clock = _pair(tmp_path)
    taking.predict(prompt_of(0))
    teach(fitting, range(100))
    taking.predict(prompt_of(0))
    taking.wait()
    assert taking.model is None
    clock.now += 10
    taking.predict(prompt_of(0))
    taking.wait()
    assert taking.model is not None


def test_a_taker_of_models_fits_none_and_keeps_its_last_one(tmp_path: Path) -> None:
    fitting, taking, clock = _pair(tmp_path)
    teach(taking, range(400))
    assert taking.model is None
    teach(fitting, range(100))
    clock.now += 10
    taking.predict(prompt_of(0))
    taking.wait()
    for path in tmp_path.iterdir():
        shutil.rmtree(path)
    (tmp_path / "trees-00000009").mkdir()
    (tmp_path / "trees-00000009" / "manifest.json").write_bytes(b"broken")
    clock.now += 10
    taking.predict(prompt_of(0))
    taking.wait()
    assert taking.predict(prompt_of(0)).predictor == "learned/v1"
    assert taking.failures == 0


def test_a_model_that_was_found_is_not_replaced_by_one_that_knows_much_less(tmp_path: Path) -> None:
    kept, rules = FITTING.model_copy(update={"model_dir": tmp_path}), replace(RULES, min_samples=64)
    before = LearnedLengths(kept, LOOP, rules=rules)
    before.hold_fits(True)
    teach(before, range(250))
    before.fit_now()
    after = LearnedLengths(kept, LOOP, rules=rules)
    teach(after, range(250, 370))
    assert after.predict(prompt_of(0)).predictor == "learned/v1"
    teach(after, range(370, 380))
    assert after.predict(prompt_of(0)).predictor == "learned/v2"


def test_a_look_that_finds_nothing_costs_next_to_nothing(tmp_path: Path) -> None:
    _, taking, clock = _pair(tmp_path)
    began = time.thread_time()
    for _ in range(1000):
        clock.now += 10
        taking.predict(prompt_of(0))
    taking.wait()
    assert (time.thread_time() - began) / 1000 < 1e-3
