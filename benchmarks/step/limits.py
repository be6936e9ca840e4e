"""What the matmuls of a step take alone: the least that its model needs on this machine, in the better precision.

Each phase's products are timed on one thread with nothing between them, in float32 and in bfloat16, and the precision
that takes less time counts. A backward pass has twice the products of a forward pass. Attention's products are counted
where a step decodes, where each token reads a cache; elsewhere they are small for contexts as short as here.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch.nn import functional

from benchmarks.engine.decode import attention, build, least_ms, linears
from benchmarks.step.phases import DECODE_MATMULS
from streamrl.producers.generation.engines.plain_forward import PlainForward

DTYPES = ("float32", "bfloat16")
ROWS = 1024
"""Tokens of one product in prefill and training, which a processor multiplies at its full speed."""


@dataclass(frozen=True)
class StepTokens:
    """Tokens of one optimizer step. ``sequences``: of a full batch. ``context``: with half a completion.

    ``prefilled``: of prompts, once a group. ``decoded``: sampled. ``computed``: went through the trained model;
    ``scored`` of these through its output layer, too.
    """

    prefilled: float
    decoded: float
    computed: float
    scored: float
    sequences: int
    context: int

    def as_row(self) -> dict[str, float]:
        """For the file of results."""
        return {name: round(value, 1) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class MatmulTimes:
    """Milliseconds: of a decode step, and for one token, of all layers' linears and of the output layer."""

    decode_ms: float
    layers_ms: float
    head_ms: float


def measured_limits(shape: str, tokens: StepTokens, seconds: float) -> dict[str, float]:
    """Processor seconds of a step's matmuls by phase; ``seconds``: of measuring, for each precision."""
    return limits_of([_times(shape, dtype, tokens, seconds) for dtype in DTYPES], tokens)


def limits_of(precisions: list[MatmulTimes], tokens: StepTokens) -> dict[str, float]:
    """The least of these precisions' seconds, by phase."""
    return {
        phase: min(_seconds(times, tokens)[phase] for times in precisions)
        for phase in ("prefill", DECODE_MATMULS, "forward", "backward")
    }


def _seconds(times: MatmulTimes, tokens: StepTokens) -> Mapping[str, float]:
    forward = 1e-3 * (tokens.computed * times.layers_ms + tokens.scored * times.head_ms)
    return {
        "prefill": 1e-3 * tokens.prefilled * times.layers_ms,
        DECODE_MATMULS: 1e-3 * tokens.decoded / tokens.sequences * times.decode_ms,
        "forward": forward,
        "backward": 2 * forward,
    }


@torch.inference_mode()
def _times(shape: str, dtype: str, tokens: StepTokens, seconds: float) -> MatmulTimes:
    torch.set_num_threads(1)
    # The engine's forward pass lays the weights out as its products of few rows need them.
    trained, sampling = build(shape, dtype), build(shape, dtype)
    PlainForward(sampling)
    head = trained.lm_head.weight
    states = torch.zeros(ROWS, head.shape[1], dtype=head.dtype)
    took = least_ms(
        {
            "linears": lambda: linears(sampling, tokens.sequences),
            "attention": attention(sampling, tokens.sequences, tokens.context),
            "layers": lambda: linears(trained.model, ROWS),
            "head": lambda: functional.linear(states, head),
        },
        seconds,
    )
    return MatmulTimes(took["linears"] + took["attention"], took["layers"] / ROWS, took["head"] / ROWS)
