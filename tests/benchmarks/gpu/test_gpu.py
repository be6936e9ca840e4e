"""The GPU benchmark on a CPU, with a model of 95 thousand parameters: that its parts measure, and rows are whole."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as bench
from benchmarks.gpu.parts import PARTS, add_arguments
from benchmarks.gpu.shapes import SHAPES, save
from streamrl.schemas.errors import UserError

SMALL = ["--device=cpu", "--steps=2", "--micro-batches=1", "--rows=2", "--length=32", "--decode-steps=2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(SHAPES["tiny"], tmp_path_factory.mktemp("tiny"), "cpu")


def options_of(arguments: Sequence[str], engine: str = "transformers") -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args([*arguments, "--batches", "1", "3"])
    options.engine, options.optimizer_offload = engine, False
    return options


@pytest.mark.parametrize("name", SHAPES)
def test_models_have_as_many_parameters_as_they_are_said_to(name: str) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(SHAPES[name].config())
    assert made.num_parameters() == pytest.approx(SHAPES[name].known.parameters, rel=0.02)


def test_every_part_measures(model: Path) -> None:
    options = options_of(SMALL)
    (trained,) = PARTS["train"](model, options)
    assert trained["fits"]
    assert trained["tokens_per_s"] > 0
    assert 0 < trained["stall_share"] < 1
    decoded = PARTS["decode"](model, options)
    assert [row["batch"] for row in decoded] == [1, 3]
    assert all(row["tokens_per_s"] > 0 for row in decoded)
    apart = {row["trainer_head"]: row["mean_nats"] for row in PARTS["mismatch"](model, options)}
    assert 0 < apart["bfloat16"] < 0.1
    assert 0 < apart["float32"] < 0.1


@pytest.mark.processes
def test_what_fails_or_takes_too_long_is_a_row(tmp_path: Path, model: Path) -> None:
    results = tmp_path / "gpu.json"
    ways = ["--parts", "decode", "--batches", "1", "--results", str(results)]
    result = bench.main([*SMALL, *ways, "--model", str(tmp_path / "none"), "--timeout=60"])
    assert [(row["part"], row["fits"]) for row in result["rows"]] == [("decode", False)]
    assert result == json.loads(results.read_text())
    late = bench.main([*SMALL, *ways, "--model", str(model), "--timeout=0.1"])
    assert late["rows"][0]["said"] == "no end within 0.1 s"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected a CUDA device, got none"):
        bench.main(["--results", str(tmp_path / "gpu.json")])
