"""``python -m benchmarks.engine.decode``: a decode step of the built-in engine, and what its matmuls alone take.

For each batch size, in one process on one thread: the model's own forward pass, the plain one, the products of the
linear layers, and those with attention's two products. Contenders take turns, and each one's least processor time
counts, so that other work on the machine slows all of them alike. The first step of a turn fills the processor's caches
and does not count.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.conditions import RESULTS, conditions, rounded, write_results
from streamrl.producers.generation.engines.own_forward import OwnForward
from streamrl.producers.generation.engines.plain_forward import PlainForward
from streamrl.producers.generation.engines.slots import RowSampler, SlotForward
from streamrl.schemas.trajectories import SamplingParams

CONTEXT = 64
"""Tokens of each sequence: half of the demo's longest."""
TURNS, STEPS = 2, 3
"""Fewest turns of a contender, and the steps of a turn that are timed."""
SHAPES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "demo": (
        "qwen2",
        {
            "vocab_size": 320,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        },
    ),
    "SmolLM2-135M": (
        "llama",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine.decode", description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--sequences", nargs="+", type=int, default=[16, 32, 64, 128])
    parser.add_argument("--seconds", type=float, default=8.0, help="processor time for a row; two turns at least")
    parser.add_argument("--results", type=Path, default=RESULTS / "decode.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    began, rows = time.monotonic(), []
    for model in options.models:
        for dtype in options.dtypes:
            for sequences in options.sequences:
                rows.append(_row(model, dtype, sequences, options.seconds))
                print(rows[-1], flush=True)
    found = {"context": CONTEXT, "rows": rows}
    libraries = ("torch", "transformers")
    write_results(options.results, found | conditions(began, 0, libraries, "make bench-decode"))


@torch.inference_mode()
def _row(name: str, dtype: str, sequences: int, seconds: float) -> dict[str, Any]:
    own, plain = build(name, dtype), build(name, dtype)
    forwards: dict[str, SlotForward] = {"own": OwnForward(own), "plain": PlainForward(plain)}
    steps = {label: _decode(forward, sequences) for label, forward in forwards.items()}
    logits = steps["own"]()
    params = [SamplingParams(max_completion_length=1)] * sequences
    sampler = RowSampler.of(params, range(sequences), [0] * sequences, logits.device)
    turns: dict[str, Callable[[], object]] = {
        **steps,
        "sampling": lambda: sampler.sample(logits),
        "linears": lambda: linears(plain, sequences),
        "attention": attention(plain, sequences),
    }
    took = least_ms(turns, seconds)
    matmuls = took["linears"] + took["attention"]
    row: dict[str, Any] = rounded(
        {
            "model": name,
            "dtype": dtype,
            "sequences": sequences,
            "own_ms": took["own"],
            "plain_ms": took["plain"],
            "linears_ms": took["linears"],
            "matmuls_ms": matmuls,
            "sampling_ms": took["sampling"],
            "own_over_plain": took["own"] / took["plain"],
            "plain_over_matmuls": took["plain"] / matmuls,
        },
        3,
    )
    return row


def build(name: str, dtype: str) -> Any:
    """A model of this shape with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model_type, shape = SHAPES[name]
    config = AutoConfig.for_model(model_type, **shape, max_position_embeddings=2 * CONTEXT)
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval().requires_grad_(False)


def _decode(forward: SlotForward, sequences: int) -> Callable[[], torch.Tensor]:
    """A decode step at position ``CONTEXT - 1`` of each row."""
    forward.cache.reserve(sequences, CONTEXT, 0, 0)
    forward.prefill([list(range(CONTEXT - 1))], [list(range(sequences))])
    tokens, positions = torch.arange(sequences), torch.full((sequences,), CONTEXT - 1)
    return lambda: forward.decode(tokens, positions, CONTEXT)


def linears(model: Any, sequences: int) -> None:
    """The products of all linear layers, for so many tokens."""
    inputs: dict[int, torch.Tensor] = {}
    for linear in model.modules():
        if isinstance(linear, torch.nn.Linear):
            if linear.in_features not in inputs:
                inputs[linear.in_features] = torch.zeros(sequences, linear.in_features, dtype=linear.weight.dtype)
            functional.linear(inputs[linear.in_features], linear.weight)


def attention(model: Any, sequences: int, context: int = CONTEXT) -> Callable[[], None]:
    """The products of queries and keys and of probabilities and values in all layers, each with a cache of its own."""
    config = model.config
    size = config.hidden_size // config.num_attention_heads
    batch, queries = sequences * config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
    caches = [torch.ones(2, batch, context, size, dtype=model.dtype) for _ in range(config.num_hidden_layers)]
    asked = torch.ones(batch, queries, size, dtype=model.dtype)
    weights = torch.ones(batch, queries, context, dtype=model.dtype)

    def run() -> None:
        for keys, values in caches:
            if model.dtype == torch.float32:
                torch.bmm(asked, keys.transpose(1, 2))
                torch.bmm(weights, values)
            else:  # where the fused kernel is faster than its two products
                functional.scaled_dot_product_attention(asked[:, None], keys[:, None], values[:, None])

    return run


def least_ms(turns: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Of each, the least processor time of a call in milliseconds; calls take turns for so many seconds."""
    least = dict.fromkeys(turns, float("inf"))
    until, done = time.thread_time() + seconds, 0
    while done < TURNS or time.thread_time() < until:
        done += 1
        for label, step in turns.items():
            step()
            for _ in range(STEPS):
                began = time.thread_time()
                step()
                least[label] = min(least[label], 1e3 * (time.thread_time() - began))
    return least


if __name__ == "__main__":
    main()
