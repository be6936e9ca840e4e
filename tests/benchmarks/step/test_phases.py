from collections import Counter
from pathlib import Path

import pytest

from benchmarks.step.phases import DECODE_MATMULS, DECODE_OVERHEAD, OTHER, RULES, Frame, phase_of, samples_by_phase

ROOT = Path(__file__).parents[3]
ENGINES = "/app/streamrl/producers/generation/engines"
STEP = [
    Frame("ThreadedEngine._step", f"{ENGINES}/threaded.py", 1),
    Frame("SlotDecoder.step", f"{ENGINES}/slots.py", 1),
]
DECODE = [*STEP, Frame("SlotModel.decode", f"{ENGINES}/slots.py", 2), Frame("decode", f"{ENGINES}/plain_forward.py", 3)]
PRODUCT = Frame("_Projection.__call__", f"{ENGINES}/plain_forward.py", 10)
TRAINING = [Frame("PolicyLearner._backward", "/app/streamrl/consumers/training/step.py", 1)]
SCORER = Frame("CompletionScorer.__call__", "/app/streamrl/consumers/algorithms/losses.py", 2)
IMPORT = Frame("_find_and_load", "<frozen importlib._bootstrap>", 1)
LOOP = Frame("Runner.run", "/lib/asyncio/runners.py", 118)
SEND = Frame("AIOKafkaClient.send", "/lib/site-packages/aiokafka/client.py", 474)
ATTENTION = Frame("attend", "/app/streamrl/consumers/training/prefix_attention.py", 1)
MODEL = Frame("LlamaModel.forward", "/lib/site-packages/transformers/models/llama/modeling_llama.py", 1)


def lines(path: str, line: int) -> str:
    return "return torch.mm(inputs, self.weight)" if line == PRODUCT.line else "hidden = functional.silu(gate)"


@pytest.mark.parametrize(
    ("stack", "phase"),
    [
        ([*DECODE, PRODUCT], DECODE_MATMULS),
        (DECODE, DECODE_OVERHEAD),
        (STEP, DECODE_OVERHEAD),
        ([*STEP, Frame("RowSampler.sample", f"{ENGINES}/slots.py", 4)], "sampling"),
        ([*STEP, Frame("prefill", f"{ENGINES}/plain_forward.py", 3), PRODUCT], "prefill"),
        ([*TRAINING, SCORER, MODEL], "forward"),
        ([*TRAINING, SCORER, MODEL, ATTENTION], "forward"),
        ([*TRAINING, Frame("_engine_run_backward", "/lib/site-packages/torch/autograd/graph.py", 1)], "backward"),
        ([LOOP], "event loop"),
        ([LOOP, SEND, Frame("StreamWriter.write", "/lib/asyncio/streams.py", 1)], "broker client"),
        ([IMPORT, Frame("<module>", f"{ENGINES}/slots.py", 9)], "imports"),
        ([Frame("<module>", "/app/streamrl/__main__.py", 1)], OTHER),
        ([], OTHER),
    ],
)
def test_the_innermost_known_frame_names_the_phase(stack: list[Frame], phase: str) -> None:
    assert phase_of(stack, lines) == phase


def test_samples_count_for_the_thread_that_was_running() -> None:
    text = (
        'process 7:"python -c a;b run";thread (7): MainThread;encode (/app/streamrl/schemas/codec.py:5) 3\n'
        'process 7:"python run";process 9:"python worker";thread (12): engine;take (/app/streamrl/bus/port.py:5) 2\n'
        'process 7:"python run";process 9:"python worker";thread (12): engine 1\n'
    )  # fmt: skip
    assert samples_by_phase(text) == {7: Counter({"codec": 3}), 12: Counter({"broker client": 2, OTHER: 1})}


def test_every_rule_is_about_a_file_that_exists() -> None:
    outside = ("<frozen importlib._bootstrap", "site-packages/", "torch/", "asyncio/")
    ours = [path for path, _, _ in RULES if not path.startswith(outside)]
    missing = [path for path in ours if not (ROOT / path).exists() and not (ROOT / "streamrl" / path).exists()]
    assert not missing
