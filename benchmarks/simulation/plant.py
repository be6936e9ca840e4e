"""What is simulated: a plant of replicas and a trainer, a workload, and the rules of a system. All times in seconds."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from streamrl.producers.generation.engines.length_trace import cumulated
from streamrl.schemas.profiles import DecodeCurve

Mode = Literal["synchronous", "stream", "one_step_async", "trajectory_async"]


@dataclass(frozen=True)
class Lengths:
    """Completion lengths: histogram ``bins`` (start, share), linear within each; the last ends at ``end``.

    ``capped``: share that reaches ``end`` and is cut there; ``factor``: all are multiplied by it.
    """

    bins: tuple[tuple[float, float], ...]
    end: float
    capped: float = 0.0
    factor: float = 1.0

    @cached_property
    def _table(self) -> tuple[np.ndarray, np.ndarray]:
        shares, ends = cumulated(self.bins, self.end)
        return shares * (1 - self.capped), ends

    def quantile(self, share: np.ndarray) -> np.ndarray:
        """Tokens at these shares, whole and at least 1."""
        known, ends = self._table
        tokens: np.ndarray = np.maximum(1, np.rint(np.interp(share, known, ends) * self.factor))
        return tokens.astype(int)

    @cached_property
    def mean(self) -> float:
        """Tokens."""
        return float(self.quantile((np.arange(20_000) + 0.5) / 20_000).mean())

    def held_mean(self, prompt: float) -> float:
        """Tokens in the cache of a running completion, mean over its time: Σ L (p + L / 2) / Σ L."""
        drawn = self.quantile((np.arange(20_000) + 0.5) / 20_000).astype(float)
        return float((drawn * (prompt + drawn / 2)).sum() / drawn.sum())


@dataclass(frozen=True)
class Tools:
    """Calls of a completion: geometric with this mean, at most so many, anywhere in it, alike; ``seconds`` of each are
    in units of 1 / ``per_s``.
    """

    mean_calls: float
    most_calls: int
    seconds: Lengths
    per_s: float = 1.0


@dataclass(frozen=True)
class Fault:
    """The first ``replicas`` fail at a moment, and are restored. ``probes_s``: moments at which tokens are counted."""

    replicas: int
    at_s: float
    lasts_s: float
    probes_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Workload:
    """``groups`` of ``group`` samples are one optimizer step; ``prompts``: their lengths; ``cap``: most tokens.

    ``tools``: that completions call; ``fault``: what happens meanwhile.
    """

    groups: int
    group: int
    lengths: Lengths
    prompts: Lengths
    cap: int
    tools: Tools | None = None
    fault: Fault | None = None

    @property
    def samples(self) -> int:
        """Of a step."""
        return self.groups * self.group

    @property
    def tokens(self) -> float:
        """Of a step, prompts included, in the mean."""
        return self.samples * (self.lengths.mean + self.prompts.mean)


@dataclass(frozen=True)
class Plant:
    """``replicas`` alike, and one trainer.

    ``arrivals_s``: from the end of a step until each replica can have its weights; ``sync_s``: of a synchronisation in
    which all of them and the trainer wait; ``stall_s``: of the trainer to hand a version over; ``train_s_per_token``,
    ``train_s_per_step``: of the whole trainer; ``control_s_per_token``: of the one process through which every sample
    passes on its way to the trainer.
    """

    replicas: int
    curve: DecodeCurve
    slots: int
    kv_tokens: int
    train_s_per_token: float
    train_s_per_step: float = 0.0
    control_s_per_token: float = 0.0
    arrivals_s: Sequence[float] = ()
    sync_s: float = 0.0
    stall_s: float = 0.0
    adopt_s: float = 0.0


@dataclass(frozen=True)
class System:
    """``dispatch``: ``plan``: a strategy's plan for a whole batch, to the letter, when all replicas are idle and have
    the newest weights; ``scheduler``: the product's scheduler, from its queues as slots get free; ``batches``: each
    replica takes a batch of its own when it is idle.

    ``adoption``: ``barrier``: all at once between batches; ``kept``: in flight, caches kept; ``computed``: in flight,
    caches computed again; ``batch``: before a replica's own batch; ``idle``: when a replica runs nothing, and gets
    no orders until then.

    ``known``: what dispatch is told of lengths. ``limit``: completions of a replica's own batch, or that the tail's
    replicas may run; 0: what the curve says. ``trains``: a step's training begins with its first group or its last.
    ``full``: share of the cache above which a replica has no tail. ``score_error``: of a ranker, in normal scores, and
    what it grows by with the score; ``log_error``: of what it says of a group, log-normal.
    ``look_s``: between two looks at what slots do; 0 for none.
    """

    name: str
    mode: Mode
    dispatch: Literal["plan", "scheduler", "batches"]
    strategy: str = "round_robin"
    adoption: Literal["barrier", "kept", "computed", "batch", "idle"] = "barrier"
    trains: Literal["batch", "stream"] = "batch"
    known: Literal["nothing", "ranker", "oracle"] = "nothing"
    colocated: bool = False
    max_staleness: int = 4
    repack: bool = False
    tail_limit: int = 0
    repack_every_s: float = 1.0
    payback: float = 16.0
    full: float = 1.0
    score_error: tuple[float, float] = (0.0, 0.0)
    log_error: float = 0.0
    look_s: float = 0.0
