"""Maps sampled stacks of Python frames to phases of the work. Pure.

A sample is the stack of a thread that was running, as py-spy writes it with `--threads --format raw --full-filenames`:
the processes and the thread, then frames from the outermost to the innermost, then how often it was seen. The innermost
frame that a rule knows names the phase. So a library's time counts for the code that called it. What an event loop does
itself counts for it only if no other frame is known.
"""

import linecache
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

DECODE_MATMULS, DECODE_OVERHEAD = "decode matmuls", "decode overhead"
OTHER, EVENT_LOOP = "other", "event loop"
CALLER = ""
"""The phase of a function that several phases call: that of its caller."""
MATMULS = ("mm(", "scaled_dot_product_attention(")
"""What a line of the decode step contains if its time is that of a product of matrices."""
RULES: tuple[tuple[str, str, str], ...] = (
    ("<frozen importlib._bootstrap", "", "imports"),
    ("producers/generation/tokenizer.py", "", "tokenising"),
    ("producers/generation/incremental_text.py", "", "tokenising"),
    ("producers/generation/engines/plain_forward.py", "prefill", "prefill"),
    ("producers/generation/engines/own_forward.py", "prefill", "prefill"),
    ("producers/generation/engines/plain_forward.py", "decode", DECODE_OVERHEAD),
    ("producers/generation/engines/own_forward.py", "decode", DECODE_OVERHEAD),
    ("producers/generation/engines/plain_forward.py", "", CALLER),
    ("producers/generation/engines/own_forward.py", "", CALLER),
    ("producers/generation/engines/slots.py", "sample|_restrict|token_at|uniforms|_mix", "sampling"),
    ("producers/generation/engines/slots.py", "_admit|_prefill", "prefill"),
    ("producers/generation/engines/slots.py", "adopt|read_weights|base_of", "adopting weights"),
    ("producers/generation/engines/slots.py", "load|_choose_forward|_difference", "loading models"),
    ("producers/generation/engines/slots.py", "", DECODE_OVERHEAD),
    ("producers/generation/engines/threaded.py", "", DECODE_OVERHEAD),
    ("producers/generation/engines/model_files.py", "", "adopting weights"),
    ("streamrl/weights/fetch.py", "", "adopting weights"),
    ("streamrl/weights/adopt.py", "", "adopting weights"),
    ("streamrl/weights/cache.py", "", "adopting weights"),
    ("streamrl/weights/relay/", "", "relaying weights"),
    ("streamrl/weights/", "", "export"),
    ("schemas/weights.py", "", "export"),
    ("schemas/files.py", "sha256_of", "digests"),
    ("producers/rewards/", "", "rewards"),
    ("schemas/codec.py", "", "codec"),
    ("schemas/messages.py", "", "codec"),
    ("site-packages/aiokafka/", "", "broker client"),
    ("streamrl/bus/", "", "broker client"),
    ("consumers/ingest/", "", "ingest"),
    ("consumers/batching/", "", "batching"),
    ("consumers/algorithms/advantages.py", "", "batching"),
    ("torch/autograd/", "_engine_run_backward|backward", "backward"),
    ("consumers/algorithms/", "", "forward"),
    ("consumers/training/optimizer.py", "", "optimizer"),
    ("consumers/training/step.py", "_backward|_forward|_token_batch|_rows|accumulate", "forward"),
    ("consumers/training/step.py", "", "optimizer"),
    ("consumers/training/policy.py", "digests|digests_of|_little_endian", "digests"),
    ("consumers/training/policy.py", "snapshot|_export", "export"),
    ("consumers/training/model.py", "take|with_floats_as|named_tensors", "export"),
    ("consumers/training/model.py", "", "loading models"),
    ("consumers/training/checkpoints/", "", "checkpoints"),
    ("consumers/training/attention.py", "", CALLER),
    ("consumers/training/prefix_attention.py", "", CALLER),
    ("streamrl/observability/", "", "observing"),
    ("producers/dispatch/", "", "dispatching"),
    ("producers/lengths/", "", "dispatching"),
    ("producers/prompts/", "", "dispatching"),
    ("streamrl/coordinator/", "", "coordinating"),
    ("producers/generation/", "", "rollouts"),
    ("consumers/training/", "", "training driver"),
    ("deploy/local/", "", "supervising"),
    ("asyncio/", "", EVENT_LOOP),
)
"""Part of a file's path, the methods' names as a regular expression (empty: all), and the phase."""
_FRAME = re.compile(r"(?P<function>.+) \((?P<path>.+?)(?::(?P<line>\d+))?\)$")
_PROCESS = re.compile(r'process \d+(?::".*")?$')
_THREAD = re.compile(r"thread \((\d+)\)")


class Frame(NamedTuple):
    """One call of a stack. ``function``: with its class, if it is a method."""

    function: str
    path: str
    line: int


def phase_of(stack: Sequence[Frame], line_of: Callable[[str, int], str] = linecache.getline) -> str:
    """The phase of a stack, outermost frame first. ``line_of``: the text of a file's line."""
    found = OTHER
    for number in range(len(stack) - 1, -1, -1):
        phase = _rule(stack[number])
        if phase == EVENT_LOOP:
            found = EVENT_LOOP
            continue
        if phase == DECODE_OVERHEAD and (inner := _innermost_of_forward(stack[number:])) is not None:
            text = line_of(inner.path, inner.line)
            return DECODE_MATMULS if any(product in text for product in MATMULS) else phase
        if phase:
            return phase
    return found


def _rule(frame: Frame) -> str | None:
    if frame.function == "<module>":  # the body of a module runs when it is imported, which an outer frame says
        return None
    name = frame.function.rpartition(".")[2]
    for path, names, phase in RULES:
        if path in frame.path and (not names or re.fullmatch(names, name)):
            return phase
    return None


def _innermost_of_forward(stack: Sequence[Frame]) -> Frame | None:
    """The innermost frame of the built-in engine's forward pass, if any of the stack is in it."""
    inner = [frame for frame in stack if frame.path.endswith("engines/plain_forward.py")]
    return inner[-1] if inner else None


def samples_of(text: str) -> Iterator[tuple[int, list[Frame], int]]:
    """Number of the thread, stack and number of samples of each line of py-spy's raw format."""
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        thread, frames = 0, []
        for part in _parts(stack):
            if (found := _THREAD.match(part)) is not None:
                thread = int(found[1])
            elif _PROCESS.match(part) is None and (frame := _FRAME.match(part)) is not None:
                frames.append(Frame(frame["function"], frame["path"], int(frame["line"] or 0)))
        yield thread, frames, int(count)


def _parts(stack: str) -> Iterator[str]:
    """The parts of a stack between semicolons, of which a quoted command line may contain some."""
    part = ""
    for piece in stack.split(";"):
        part = f"{part};{piece}" if part else piece
        if not part.startswith("process ") or part.endswith('"') or '"' not in part:
            yield part
            part = ""


def samples_by_phase(text: str) -> dict[int, Counter[str]]:
    """How many samples of each thread, by its number, were in which phase."""
    found: dict[int, Counter[str]] = {}
    for thread, stack, count in samples_of(text):
        found.setdefault(thread, Counter())[phase_of(stack)] += count
    return found
