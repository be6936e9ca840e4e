"""The README.md of a checkpoint, as the hub and people read it."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from streamrl.consumers.training.checkpoints.manifest import CARD
from streamrl.consumers.training.checkpoints.savepoints import Savepoints, problems_of
from streamrl.consumers.training.checkpoints.storage import open_storage
from streamrl.consumers.training.checkpoints.store import CheckpointStore
from streamrl.consumers.training.policy import PolicyPaths, TrainedPolicy
from streamrl.deploy.wiring.model_card import model_card
from streamrl.settings.loading import load_settings
from streamrl.settings.tree import Settings
from tests.consumers.training.checkpoints.damaged_storage import manifest_of
from tests.consumers.training.factories import make_micro_batch, save_tiny_model


def settings_of(directory: Path, **more: Any) -> Settings:
    tree = {
        "run": {"name": "mine", "directory": str(directory)},
        "model": {"path": "Qwen/Qwen3-0.6B"},
        "data": {"path": "openai/gsm8k"},
        "training": {"learning_rate": 5e-06, "max_steps": 40, "device": "cpu", "threads": 1},
    }
    return load_settings(None, [], tree | more)


def test_a_card_says_what_was_trained_with_what_and_how_to_load_it(tmp_path: Path) -> None:
    card = ModelCard(model_card(settings_of(tmp_path), manifest_of(1, 20)))
    front = card.data.to_dict()
    assert front["base_model"] == "Qwen/Qwen3-0.6B"
    assert front["datasets"] == ["openai/gsm8k"]
    assert (front["library_name"], front["pipeline_tag"]) == ("transformers", "text-generation")
    assert front["tags"] == ["streamrl", "reinforcement-learning", "grpo"]
    for line in (
        "# mine, step 20",
        "| model | Qwen/Qwen3-0.6B |",
        "| data | openai/gsm8k, train |",
        "| algorithm | grpo |",
        "| learning rate | 5e-06, constant |",
        "| step | 20 of 40 (1-20) |",
        'model = AutoModelForCausalLM.from_pretrained("THIS_DIRECTORY")',
        "| training.max_steps | 40 |",
    ):
        assert line in card.text.splitlines(), line
    assert "| torch | " in card.text


def test_what_the_hub_does_not_know_is_not_in_the_front_matter(tmp_path: Path) -> None:
    local = tmp_path / "own" / "model"
    local.mkdir(parents=True)
    settings = settings_of(tmp_path, model={"path": str(local)}, data={"path": str(tmp_path / "own")})
    card = ModelCard(model_card(settings, manifest_of(1, 3)))
    assert not card.data.to_dict().keys() & {"base_model", "datasets"}
    assert f"| model | {local} |" in card.text
    assert "## Held out" not in card.text


def test_an_adapter_is_loaded_by_peft_and_its_merged_model_by_transformers(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, training={"lora": {"rank": 4}})
    adapter = ModelCard(model_card(settings, manifest_of(1, 3)))
    merged = ModelCard(model_card(settings, manifest_of(1, 3), is_merged=True))
    assert [card.data.to_dict()["library_name"] for card in (adapter, merged)] == ["peft", "transformers"]
    assert "AutoPeftModelForCausalLM" in adapter.text
    assert "AutoPeftModelForCausalLM" not in merged.text


@pytest.mark.processes
def test_a_checkpoint_lists_its_card_and_two_equal_ones_have_equal_cards(tmp_path: Path) -> None:
    texts, settings = [], settings_of(tmp_path)
    for place in (tmp_path / "one", tmp_path / "other"):
        storage = open_storage(place / "checkpoints", place / "cache")
        base, card = save_tiny_model(place / "base"), partial(model_card, settings)
        paths = PolicyPaths(str(base), storage, place / "weights", card)
        policy = TrainedPolicy(paths, settings.algorithm, settings.training, 8, None, seed=3)
        policy.accumulate(make_micro_batch(6, 1))
        assert policy.finish_step(1.0).applied
        lineage = CheckpointStore(storage, 2).claim_lineage(now=1.0)
        policy.checkpoint(manifest_of(lineage.number, policy.step), {}, b"", lineage)
        (entry,) = Savepoints.read(storage).entries
        assert problems_of(storage, entry) == []
        assert entry.manifest is not None
        assert CARD in {file.path for file in entry.manifest.files}
        newest = CheckpointStore(storage, 2).newest()
        assert newest is not None
        texts.append((newest.directory / CARD).read_text())
    assert texts[0] == texts[1]
    assert "# mine, step 1" in texts[0]
