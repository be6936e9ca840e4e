"""Measures this hardware: decode steps and prefills, training steps and exports, and weight transfer."""

import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.bus.embedded.node import free_ports
from streamrl.bus.waiting import in_thread
from streamrl.consumers.batching.micro_batches import MicroBatch
from streamrl.consumers.training.ports import Compute, Policy
from streamrl.planning.sharing import SharingMeter
from streamrl.producers.generation.engines.model_files import ModelFacts
from streamrl.producers.generation.engines.port import ActiveCompletion, Decoder, GenerationRequest
from streamrl.schemas.control import WeightsReady
from streamrl.schemas.errors import ModelError, StreamRLError, WeightsError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import RecordRef
from streamrl.schemas.trajectories import SamplingParams
from streamrl.weights.fetch import WeightsFetcher
from streamrl.weights.relay.server import Relay
from streamrl.weights.settings import RelaySettings
from streamrl.weights.store import WeightStore

# A copy of a model's directory without an end-of-sequence token, so that completions reach the wanted length. The
# weights are linked, not copied. This part knows no engine.

END_KEYS = {
    "config.json": "eos_token_id",
    "generation_config.json": "eos_token_id",
    "tokenizer_config.json": "eos_token",
    "special_tokens_map.json": "eos_token",
}
"""The files that name an end, with the key. Without the key a model or tokenizer may have a default, null is none."""


def endless_model(model: str, directory: Path) -> Path:
    """A directory that loads like the model, but whose model never ends a completion.

    Raises:
        ModelError: the model is not on this machine.
    """
    source = _local(model)
    directory.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and path.name not in END_KEYS:
            # Resolved: a relative target would be looked up next to the link.
            (directory / path.name).symlink_to(path.resolve())
    for name, key in END_KEYS.items():
        if (source / name).is_file():
            content = json.loads((source / name).read_text())
            (directory / name).write_text(json.dumps(_without(key, content) | {key: None}))
    return directory


def _local(model: str) -> Path:
    if (path := Path(model)).is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError) as error:
        raise ModelError(f"expected a local model in model.path, got {model!r}; download it first") from error


def _without(key: str, content: dict[str, Any]) -> dict[str, Any]:
    # Recursive: a model of several parts has the token in each part's configuration.
    return {
        name: _without(key, value) if isinstance(value, dict) else None if name == key else value
        for name, value in content.items()
    }


# Seconds of decode steps by batch size and context, and of prefills, on a loaded decoder. The decoder's model must not
# end completions. This part knows no curve.

SHORTEST_PROMPT = 8
ROUNDS_TO_START = 10_000
PREFILLS = 5
UNEVEN = 1 / 8
FEWEST_STEPS = 4
POINT_S = 1.0
"""Seconds for the timed decode steps of a point, if that allows for ``FEWEST_STEPS``."""
SHARING_S = 2.0
"""Seconds of the work that is measured beside other processes, and alone."""


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """The time of a decode step of ``batch`` completions with ``context`` tokens in all their caches together.

    ``padded``: tokens in the caches if each were as long as the longest. ``seconds``: the median of the timed steps.
    ``mean_s``: their mean in seconds, including pauses of the process and the machine.
    """

    batch: int
    context: int
    padded: int
    seconds: float
    mean_s: float


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """The seconds that admitting ``prompts`` prompts of ``tokens`` tokens in total adds to a decode step."""

    prompts: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class DecodeMeter:
    """Measures a decoder. ``steps``: most decode steps per point, each timed separately; ``clock``: in seconds."""

    decoder: Decoder[Any]
    facts: ModelFacts
    steps: int
    clock: Callable[[], float] = time.perf_counter

    def steps_at(self, batches: Sequence[int], contexts: Sequence[int]) -> Iterator[DecodePoint]:
        """Points for all batch sizes, with contexts up to each of these lengths.

        The contexts in a batch differ as in a run: from the longest down to an eighth of it. So an engine that pads to
        the longest is measured under real conditions; for others only the sum of the contexts matters.
        """
        # Warm-up steps: one-time work of an engine's first steps must not enter a point.
        self._fill([SHORTEST_PROMPT] * min(batches))
        self._timed()
        self.decoder.clear()
        for batch in batches:
            for context in contexts:
                running = self._fill(uneven(context, batch))
                before = _cached(running)
                taken = self._timed()
                # Each cache grows by one token per step; the median step had about the mean of start and end.
                context_then = (before + _cached(running)) // 2
                grown = (_cached(running) - before) // 2
                padded = batch * max(completion.position for completion in running) - grown
                yield DecodePoint(batch, context_then, padded, statistics.median(taken), statistics.fmean(taken))
                self.decoder.clear()

    def prefills_at(self, lengths: Sequence[int], counts: Sequence[int]) -> Iterator[PrefillPoint]:
        """Points for each number of prompts of each length at once, on an otherwise empty decoder."""
        for length in lengths:
            for number in counts:
                # The median, since a difference of two measurements errs in both directions and may be negative.
                seconds = statistics.median(self._prefill_s(number, length) for _ in range(PREFILLS))
                yield PrefillPoint(number, number * length, max(0.0, seconds))

    def _prefill_s(self, number: int, length: int) -> float:
        running = self._add([length] * number)
        started_at = self.clock()
        rounds = self._until_all_run(running)
        seconds = self.clock() - started_at
        # Each round also decoded a token, which is not part of the prefill.
        seconds -= rounds * statistics.median(self._timed())
        self.decoder.clear()
        return seconds

    def share(self, batch: int, context: int, meter: SharingMeter) -> None:
        """Measure how decoding is slowed while the other cores compute. Arguments as for ``steps_at``."""
        self._rounds(batch, context, 1)
        with meter.alone():
            rounds = self._rounds(batch, context)
        with meter.crowded():
            self._rounds(batch, context, rounds)

    def _rounds(self, batch: int, context: int, rounds: int | None = None) -> int:
        """Decode so many fresh batches; None: for ``SHARING_S`` seconds. Returns their number."""
        started_at, done = self.clock(), 0
        while done < rounds if rounds is not None else self.clock() - started_at < SHARING_S:
            self._fill(uneven(context, batch))
            self._timed()
            self.decoder.clear()
            done += 1
        return done

    def longest_context(self) -> int:
        """Length of the longest prompt that leaves room in the model for all timed steps."""
        return self.facts.max_length - self.steps - 8

    def _fill(self, lengths: Sequence[int]) -> list[ActiveCompletion]:
        running = self._add(lengths)
        self._until_all_run(running)
        return running

    def _add(self, lengths: Sequence[int]) -> list[ActiveCompletion]:
        # Random tokens, so that no two prompts share a prefix, which an engine could compute only once.
        chance = random.Random(sum(lengths))
        running = []
        for index, length in enumerate(lengths):
            limit = self.facts.max_length - length
            prompt = [chance.randrange(self.facts.vocab_size) for _ in range(length)]
            sampling = SamplingParams(max_completion_length=limit)
            running.append(ActiveCompletion(GenerationRequest(f"profile/{index}", prompt, sampling), limit, index))
            self.decoder.queue(running[-1])
        return running

    def _until_all_run(self, running: Sequence[ActiveCompletion]) -> int:
        for rounds in range(1, ROUNDS_TO_START):
            self.decoder.step()
            if any(completion.finish_reason for completion in running):
                raise ModelError(
                    f"expected {len(running)} completions to run at once, got one that ended before all had started; "
                    "lower generation.max_num_seqs, or give the key-value cache more memory"
                )
            if all(completion.generated for completion in running):
                return rounds
        raise ModelError(f"expected {len(running)} completions to start, got none after {ROUNDS_TO_START} steps")

    def _timed(self) -> list[float]:
        """Seconds of each timed step, after one warm-up step."""
        self.decoder.step()
        seconds: list[float] = []
        while len(seconds) < self.steps and (len(seconds) < FEWEST_STEPS or sum(seconds) < POINT_S):
            started_at = self.clock()
            self.decoder.step()
            seconds.append(self.clock() - started_at)
        return seconds


def _cached(running: Sequence[ActiveCompletion]) -> int:
    return sum(completion.position for completion in running)


def uneven(longest: int, number: int) -> list[int]:
    """``number`` lengths from the longest down to an eighth of it, each the same share of the one before."""
    share = UNEVEN ** (1 / max(1, number - 1))
    return [max(1, round(longest * share**index)) for index in range(number)]


# Seconds of micro-batches, optimizer steps and exports on the real policy, with made-up samples. This part knows no
# topics; the policy computes in one thread, as in a trainer.

LARGEST_ID = 1 << 15
LONGEST_STEP_S = 2.0
"""About the longest optimizer step to measure: on a slow device, a whole budget of tokens would take minutes."""


@dataclass(frozen=True, slots=True)
class StepPoint:
    """The seconds of an optimizer step over ``micro_batches`` micro-batches.

    ``tokens``: in all of them; ``squares``: sum of the squared sequence lengths.
    """

    micro_batches: int
    tokens: int
    squares: int
    seconds: float


@dataclass(frozen=True)
class TrainMeter:
    """Measures training. ``repeats``: steps per point; the fastest counts, since other processes only slow a step."""

    policy: Policy
    compute: Compute
    repeats: int

    async def steps_at(self, lengths: Sequence[int], budget: int) -> "Sequence[StepPoint]":
        """Points for sequences of these lengths: one row, and as many as fit the budget and ``LONGEST_STEP_S``.

        One row is measured in one and in three passes, which separates the cost of a micro-batch from the optimizer's.
        """
        points: list[StepPoint] = []
        # A first step creates the optimizer's state, and is not counted.
        await self._step(synthetic(1, min(lengths), self.policy.limits.vocabulary), 1)
        for length in lengths:
            points += [await self._point(1, length, passes) for passes in (1, 3)]
            rows = 1
            for _ in range(2):  # the larger of two points is chosen by the smaller one
                most = min(budget, self._affordable(points[-1])) // length
                if most <= rows:
                    break
                rows = most
                points.append(await self._point(rows, length, 1))
        return points

    async def _point(self, rows: int, length: int, passes: int) -> StepPoint:
        batch = synthetic(rows, length, self.policy.limits.vocabulary)
        seconds = min([await self._step(batch, passes) for _ in range(self.repeats)])
        tokens = passes * rows * length
        return StepPoint(passes, tokens, tokens * length, seconds)  # sum of n^2 = passes * rows * n^2

    @staticmethod
    def _affordable(point: StepPoint) -> int:
        """Tokens of a step of about ``LONGEST_STEP_S``, by a step of the same length; a larger one costs less each."""
        return int(LONGEST_STEP_S / point.seconds * point.tokens)

    async def share(self, lengths: Sequence[int], budget: int, meter: SharingMeter) -> None:
        """Measure how training is slowed while the other cores compute. Arguments as for ``steps_at``."""
        length = min(budget, lengths[len(lengths) // 2])
        alone = await self._point(1, length, 1)
        rows = max(1, min(budget, self._affordable(alone)) // length)
        batch = synthetic(rows, length, self.policy.limits.vocabulary)
        rounds = max(2, round(SHARING_S / await self._step(batch, 1)))
        with meter.alone():
            for _ in range(rounds):
                await self._step(batch, 1)
        with meter.crowded():
            for _ in range(rounds):
                await self._step(batch, 1)

    async def export(self, version: PolicyVersion) -> tuple[str, float]:
        """Export weights to the store; returns the sha256 of their manifest, and the seconds it took."""
        await self._step(synthetic(1, 8, self.policy.limits.vocabulary), 1)
        started_at = time.perf_counter()
        snapshot = await self.compute(self.policy.snapshot)
        sha256 = await self.compute(snapshot.export, version, time.time())
        return sha256, time.perf_counter() - started_at

    async def _step(self, batch: MicroBatch, passes: int) -> float:
        started_at = time.perf_counter()
        for _ in range(passes):
            await self.compute(self.policy.accumulate, batch)
        outcome = await self.compute(self.policy.finish_step, 1.0)
        if not outcome.applied:
            raise StreamRLError(f"expected an optimizer step on made-up samples, got: {outcome.problem}")
        return time.perf_counter() - started_at


def synthetic(rows: int, length: int, vocabulary: int) -> MicroBatch:
    """A micro-batch without padding: random tokens, half of them completion, advantages of both signs."""
    chance = np.random.default_rng(length * 4099 + rows)
    mask = np.zeros((rows, length), dtype=np.float32)
    mask[:, max(1, length // 2) :] = 1.0  # [rows, length]; the first token is never predicted
    return MicroBatch(
        input_ids=chance.integers(0, min(vocabulary, LARGEST_ID), (rows, length), dtype=np.int64),
        loss_mask=mask,
        behaviour_logprobs=np.full((rows, length), -5.0, dtype=np.float32),
        advantages=np.where(np.arange(rows) % 2, 1.0, -1.0).astype(np.float32),
        lengths=np.full(rows, length, dtype=np.int64),
        temperatures=np.ones(rows, dtype=np.float32),
        refs=tuple(RecordRef(f"profile/{row}", 0, row) for row in range(rows)),
    )


# Seconds from weights in the store to an engine that samples with them, through the real relay and fetcher.

STARTING_S = 10.0


@dataclass(frozen=True, slots=True)
class TransferPoint:
    """Seconds of a weight transfer. ``fetch_s``: with checking; ``adopt_s``: during which the decoder stalls."""

    fetch_s: float
    read_s: float
    adopt_s: float

    @property
    def total_s(self) -> float:
        """Seconds from store to sampling."""
        return self.fetch_s + self.read_s + self.adopt_s


async def measure_transfer(ready: WeightsReady, cache: Path, decoder: Decoder[Any]) -> TransferPoint:
    """Transfer one announced version into an idle decoder, and measure it."""
    started_at = time.perf_counter()
    directory = await WeightsFetcher(cache).fetch(ready)
    fetched_at = time.perf_counter()
    weights = decoder.read_weights(directory)
    read_at = time.perf_counter()
    # In a thread, as in workers: vLLM's decoder waits in its own event loop.
    await in_thread(decoder.adopt, weights)
    return TransferPoint(fetched_at - started_at, read_at - fetched_at, time.perf_counter() - read_at)


@asynccontextmanager
async def open_relay(store: Path) -> AsyncIterator[str]:
    """Run a relay over a weights store during the block; gives its address on the loopback interface."""
    (port,) = free_ports(1)
    settings, stop = RelaySettings(port=port), asyncio.Event()
    serving = asyncio.create_task(Relay(WeightStore(store), settings).run(stop))
    try:
        await _answers(settings.host, port)
        yield f"http://{settings.host}:{port}"
    finally:
        stop.set()
        await serving


async def _answers(host: str, port: int) -> None:
    deadline = time.monotonic() + STARTING_S
    while time.monotonic() < deadline:
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError:
            await asyncio.sleep(0.02)
        else:
            writer.close()
            return
    raise WeightsError(f"expected a relay on {host}:{port}, got no answer within {STARTING_S} s")
