import time
from pathlib import Path

import pytest

from schemas.errors import ModelError
from streamrl.demo.evaluation import evaluate
from streamrl.demo.warm_start import NUM_PROMPTS, PROMPTS, ModelShape, WarmStartRecipe, ensure_warm_started_model

pytestmark = pytest.mark.slow  # the child process imports torch and transformers

TINY = ModelShape(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
)
RECIPE = WarmStartRecipe(shape=TINY, steps=2, decay_steps=1, check_every=1)


def test_a_cached_model_is_whole_and_comes_back_at_once(tmp_path: Path) -> None:
    lines: list[str] = []
    made = ensure_warm_started_model(tmp_path, 0, lines.append, RECIPE)
    names = {path.name for path in made.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "MODEL_CARD.md"} <= names
    assert len((made / PROMPTS).read_text().splitlines()) == NUM_PROMPTS
    assert any("held-out questions" in line for line in lines)

    began = time.monotonic()
    assert ensure_warm_started_model(tmp_path, 0, lines.append, RECIPE) == made
    assert time.monotonic() - began < 0.1
    assert [path.name for path in made.parent.iterdir()] == [made.name]

    judged = evaluate(made, seed=0)
    card = (made / "MODEL_CARD.md").read_text()
    assert all(f"| {name} | {value} |" in card for name, value in judged["metrics"].items())
    assert judged["metrics"]["accuracy"] < 0.05
    assert {"prompt", "completion", "answer", "style", "correct", "tokens"} == judged["samples"][0].keys()


def test_a_failed_warm_start_leaves_nothing_behind(tmp_path: Path) -> None:
    broken = WarmStartRecipe(shape=TINY, steps=1, batch_size=-1)
    with pytest.raises(ModelError, match="warm start"):
        ensure_warm_started_model(tmp_path, 0, lambda line: None, broken)
    assert list((tmp_path / "models").iterdir()) == []
