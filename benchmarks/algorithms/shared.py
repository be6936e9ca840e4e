"""Three algorithms one after another, each with generation of its own, against the three on one stream.

Apart, each is a run with its own trainer. Together, the first one's run is served and the others are attached to it
from the beginning of the topic. All take the same number of optimizer steps of equally many groups. Tokens are what the
workers generated, what nobody trained in the end included; seconds are from the command's start until the last process
has ended, starting and reporting included.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.algorithms.emulated import WORKLOAD, stream
from benchmarks.algorithms.streams import PATIENCE_S, Stream, generated, read_counts
from streamrl.bus.embedded.cluster import start_cluster
from streamrl.schemas.errors import StreamRLError

ALGORITHMS = ("grpo", "rloo", "ppo")
"""The first one is served where they share."""
SECONDS_A_STEP = 5.0
"""Patience: five times what a step takes."""
DOES_NOT_SHOW = (
    "trainers that are slower than generation, or share its devices: sharing saves less time there, if as many tokens; "
    "what an algorithm loses because another one's policy sampled what it trains"
)


def measured(steps: int, seed: int) -> dict[str, Any]:
    """``shared_tokens_ratio``, ``shared_seconds_ratio``: the sum over runs of their own, over the shared stream."""
    with tempfile.TemporaryDirectory(prefix="streamrl-shared-") as scratch:
        folder = Path(scratch)
        with start_cluster(folder / "kafka") as cluster:
            apart = [_run(folder, cluster.bootstrap_servers, (name,), steps, seed) for name in ALGORITHMS]
            together = _run(folder, cluster.bootstrap_servers, ALGORITHMS, steps, seed)
    return ratios(apart, together) | {
        "conditions": {"workload": WORKLOAD, "steps": steps, "does_not_show": DOES_NOT_SHOW},
    }


def ratios(apart: list[dict[str, Any]], together: dict[str, Any]) -> dict[str, Any]:
    """Of rows with ``tokens`` and ``seconds``; the rows themselves as well."""
    tokens, seconds = (sum(row[key] for row in apart) / together[key] for key in ("tokens", "seconds"))
    return {
        "shared_tokens_ratio": round(tokens, 3),
        "shared_seconds_ratio": round(seconds, 3),
        "shared": [*apart, together],
    }


def _run(folder: Path, address: str, algorithms: tuple[str, ...], steps: int, seed: int) -> dict[str, Any]:
    """One run of the first, with the others attached: ``algorithms``, ``tokens``, ``seconds``."""
    name, patience_s = "-".join(algorithms), PATIENCE_S + steps * SECONDS_A_STEP
    began = time.monotonic()
    with stream(folder, address, name, algorithms[0], steps, seed) as served:
        if others := algorithms[1:]:
            # A run without a trainer has nothing to attach to.
            served.until(lambda: served.step() > 0, "the first step")
            for other in others:
                served.attach(other, other, "beginning")
        served.finished(patience_s)
        for other in others:
            served.ended(other, patience_s)
        seconds = time.monotonic() - began
        _check_steps(served, others, steps)
    tokens = generated(read_counts(address, name))
    row = {"algorithms": " + ".join(algorithms), "tokens": tokens, "seconds": round(seconds, 2)}
    print(f"{' + '.join(algorithms)}: {steps} steps each, {tokens:,} tokens generated, {seconds:.1f} s", flush=True)
    return row


def _check_steps(served: Stream, others: tuple[str, ...], steps: int) -> None:
    taken = [served.step(name) for name in ("", *others)]
    if any(count != steps for count in taken):
        raise StreamRLError(f"expected {steps} steps of each trainer, got {taken}")
