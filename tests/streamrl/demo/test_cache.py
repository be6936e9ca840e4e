import hashlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from streamrl.demo.evaluation import EVALUATION, evaluate
from streamrl.demo.warm_start import (
    EVALUATED,
    MADE,
    NUM_PROMPTS,
    PROMPTS,
    SHIPPED,
    WEIGHTS,
    ModelShape,
    WarmStartRecipe,
    ensure_warm_started_model,
    make_once,
    model_directory,
    ship,
    unpack,
)
from streamrl.deploy.local.evaluation import known_evaluation
from streamrl.schemas.errors import ModelError
from tests.progress import calm_s

TINY = ModelShape(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
)
RECIPE = WarmStartRecipe(shape=TINY, steps=2, decay_steps=1, check_every=1)


@pytest.mark.processes
def test_a_cached_model_is_complete_and_comes_back_at_once(tmp_path: Path) -> None:
    lines: list[str] = []
    made = ensure_warm_started_model(tmp_path, 0, lines.append, RECIPE)
    names = {path.name for path in made.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "MODEL_CARD.md"} <= names
    assert len((made / PROMPTS).read_text().splitlines()) == NUM_PROMPTS
    assert any("held-out questions" in line for line in lines)

    began = calm_s()
    assert ensure_warm_started_model(tmp_path, 0, lines.append, RECIPE) == made
    assert calm_s() - began < 0.1
    assert [path.name for path in made.parent.iterdir()] == [made.name]

    judged = evaluate(made, seed=0)
    card = (made / "MODEL_CARD.md").read_text()
    assert all(f"| {name} | {value} |" in card for name, value in judged["metrics"].items())
    assert judged["metrics"]["accuracy"] < 0.05
    assert {"prompt", "completion", "answer", "style", "correct", "tokens"} == judged["samples"][0].keys()


def test_a_shipped_model_is_the_recipes_and_taken_without_training(tmp_path: Path) -> None:
    shipped = SHIPPED / model_directory(tmp_path, 0).name
    assert shipped.is_dir(), "the recipe has changed; run python -m streamrl.demo.warm_start, and commit what it writes"
    conditions = json.loads((shipped / MADE).read_text())
    assert hashlib.sha256((shipped / WEIGHTS).read_bytes()).hexdigest() == conditions["weights_sha256"]
    assert [folder.name for folder in SHIPPED.iterdir()] == [shipped.name]

    lines: list[str] = []
    made = ensure_warm_started_model(tmp_path, 0, lines.append)
    assert lines == ["warm start: done before, and shipped with StreamRL"]
    assert len((made / PROMPTS).read_text().splitlines()) == NUM_PROMPTS
    known, found = json.loads((shipped / EVALUATED).read_text()), evaluate(made, seed=0)
    for name, value in known["metrics"].items():  # processors round differently, so some samples differ
        assert found["metrics"][name] == pytest.approx(value, abs=0.03, rel=0.03), name
    if (before := known_evaluation(EVALUATION, made, 0)) is not None:
        assert before.metrics == known["metrics"]


@pytest.mark.processes
def test_a_shipped_model_is_the_same_as_one_that_is_trained(tmp_path: Path) -> None:
    trained = ensure_warm_started_model(tmp_path, 3, lambda line: None, RECIPE)
    shipped = ship(tmp_path / "shipped", 3, RECIPE, lambda line: None)
    assert shipped.name == trained.name
    unpack(shipped, tmp_path / "unpacked", 3)
    assert {path.name: path.read_bytes() for path in (tmp_path / "unpacked").iterdir()} == {
        path.name: path.read_bytes() for path in trained.iterdir()
    }


@pytest.mark.processes
def test_a_failed_warm_start_leaves_no_files(tmp_path: Path) -> None:
    broken = WarmStartRecipe(shape=TINY, steps=1, batch_size=-1)
    with pytest.raises(ModelError, match="warm start"):
        ensure_warm_started_model(tmp_path, 0, lambda line: None, broken)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_second_process_waits_for_the_first_ones_result(tmp_path: Path) -> None:
    target, made, said = tmp_path / "models" / "it", list[str](), list[str]()
    begun, waiting = threading.Event(), threading.Event()

    def make(name: str, directory: Path) -> None:
        begun.set()
        assert waiting.wait(60)
        made.append(name)
        directory.mkdir()

    def tell(line: str) -> None:
        said.append(line)
        waiting.set()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(make_once, target, partial(make, "first"), tell)
        assert begun.wait(60)
        second = pool.submit(make_once, target, partial(make, "second"), tell)
        for done in (first, second):
            done.result(60)
    assert made == ["first"]
    assert said == [f"waiting for another process that makes {target}"]
    assert target.is_dir()


def test_the_next_caller_makes_what_failed_before(tmp_path: Path) -> None:
    target = tmp_path / "models" / "it"

    def fail(_directory: Path) -> None:
        raise ModelError("no")

    with pytest.raises(ModelError, match="no"):
        make_once(target, fail, print)
    make_once(target, Path.mkdir, print)
    assert target.is_dir()
