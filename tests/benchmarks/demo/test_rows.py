import json
from pathlib import Path

import torch

from benchmarks.demo.__main__ import line, main, row_of
from benchmarks.demo.control import train
from streamrl.demo.task import build_tokenizer
from streamrl.demo.warm_start import ModelShape, WarmStartRecipe, build_model

SUMMARY = {
    "seed": 2,
    "engine": "vllm",
    "accuracy_before": 0.1,
    "accuracy_after": 0.9,
    "sampled_accuracy_before": 0.4,
    "sampled_accuracy_after": 0.85,
    "pass_at_8_before": 0.95,
    "pass_at_8_after": 0.97,
    "accuracy_bare_before": 0.05,
    "accuracy_worked_before": 0.8,
    "accuracy_worked_after": 0.86,
    "share_worked_before": 0.5,
    "share_worked_after": 1.0,
    "mean_length_before": 18.0,
    "mean_length_after": 34.0,
    "run_seconds": 120.0,
    "steps": 120,
    "trajectories": 15360,
}
CONTROL = {"steps": 10, "solutions": 320, "cpu_seconds": 99.96, "metrics": {"accuracy": 0.2, "sampled_accuracy": 0.5}}


def test_a_row_has_what_the_demo_and_its_control_came_to() -> None:
    row = row_of(SUMMARY, CONTROL)
    wanted = {
        "seed": 2,
        "engine": "vllm",
        "before": 0.1,
        "after": 0.9,
        "pass_at_8_before": 0.95,
        "train_seconds": 120.0,
    }
    wanted |= {
        "sampled_before": 0.4,
        "control_after": 0.2,
        "gain": 0.8,
        "control_gain": 0.1,
        "control_cpu_seconds": 100.0,
    }
    assert wanted.items() <= row.items()
    assert row["bare_after"] is None
    assert "greedy 0.100 → 0.900 in 120 s, control 0.200" in line(row)


def test_rows_that_are_there_are_not_measured_again(tmp_path: Path) -> None:
    results = tmp_path / "demo.json"
    kept = [row_of(SUMMARY, CONTROL) | {"seed": seed} for seed in (0, 1)]
    results.write_text(json.dumps(kept))
    assert main(["--seeds", "0,1", "--engine", "vllm", "--results", str(results)]) == kept


def test_the_control_spends_its_processor_time_and_learns() -> None:
    torch.set_num_threads(1)
    shape = ModelShape(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
    )
    recipe = WarmStartRecipe(shape=shape, batch_size=8)
    model = build_model(shape, 0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    told = train(model, build_tokenizer(), 0, 0.3, recipe)
    assert told["cpu_seconds"] >= 0.3
    assert told["solutions"] == 8 * told["steps"] > 0
    assert not torch.equal(before["lm_head.weight"], model.state_dict()["lm_head.weight"])
