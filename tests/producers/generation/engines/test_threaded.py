"""The engine's thread and the event loop, with a decoder written for the test."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from streamrl.producers.generation.engines.model_files import ModelFacts
from streamrl.producers.generation.engines.port import ActiveCompletion, DecoderLost, GenerationRequest
from streamrl.producers.generation.engines.threaded import ThreadedEngine
from streamrl.producers.generation.vocabulary import EndTokens
from streamrl.schemas.errors import EngineError, ModelError, PromptRefused, WeightsError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import FinishReason
from tests.fakes.waiting import until
from tests.producers.generation.engines.replay import request, sample
from tests.progress import within

PAUSE_S = 0.0005


class CountingDecoder:
    """Samples 0, 1, 2 … for every completion; the log-probability tells which weights were in place."""

    name = "counting"
    kv_tokens = None

    def __init__(self) -> None:
        self.running: list[ActiveCompletion] = []
        self.weights = 0.0
        self.steps = 0
        self.threads: set[int] = set()
        self.fails_with: int | None = None  # so many running completions, once
        self.ahead = self.lost = self.closed = False
        self.unloadable: Exception | None = None
        self.given_up = threading.Event()
        self.loads_until_given_up = self.reads_until_given_up = False
        self.reading = self.most_reading = 0

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def load(self) -> ModelFacts:
        if self.unloadable:
            raise self.unloadable
        if self.loads_until_given_up:
            self.given_up.wait()
            raise ModelError("expected a model that is wanted")
        return ModelFacts(1000, 5000, EndTokens({}, {}), 0, {}, None)

    def give_up(self) -> None:
        self.given_up.set()

    def queue(self, completion: ActiveCompletion) -> None:
        if completion.request.prompt_token_ids[0] == 666:
            raise ValueError("no such prompt")
        self.running.append(completion)

    def drop(self, completion: ActiveCompletion) -> None:
        self.running.remove(completion)

    def clear(self) -> None:
        self.running.clear()

    def step(self) -> Iterable[ActiveCompletion]:
        time.sleep(PAUSE_S)
        self.threads.add(threading.get_ident())
        self.steps += 1
        if self.lost:
            raise DecoderLost("its process was killed")
        if len(self.running) == self.fails_with:
            self.fails_with = None
            raise RuntimeError("out of memory")
        advanced = list(self.running)
        for completion in advanced:
            completion.extend([completion.generated], [self.weights])
            if completion.generated == completion.limit:
                completion.finish_reason = FinishReason.LENGTH
                self.running.remove(completion)
        return advanced

    def pause(self) -> Iterable[ActiveCompletion]:
        """As a decoder that samples ahead: two tokens more, by the old weights."""
        for _ in range(2 if self.ahead else 0):
            yield from self.step()

    def read_weights(self, directory: Path) -> float:
        if directory.name == "bad":
            raise WeightsError("expected good weights, got bad ones")
        self.reading += 1
        self.most_reading = max(self.reading, self.most_reading)
        if self.reads_until_given_up:
            self.given_up.wait()
        time.sleep(5 * PAUSE_S)
        self.reading -= 1
        return float(directory.name)

    def adopt(self, weights: float) -> None:
        if weights > 100:
            raise RuntimeError("device lost")
        self.weights = weights

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def decoder() -> CountingDecoder:
    return CountingDecoder()


@pytest.fixture
async def engine(decoder: CountingDecoder) -> AsyncIterator[ThreadedEngine]:
    engine = ThreadedEngine(decoder, max_num_seqs=4, chunk_tokens=10)
    await engine.start()
    yield engine
    await engine.close()


async def test_tokens_come_in_chunks_and_in_order(engine: ThreadedEngine, decoder: CountingDecoder) -> None:
    deltas = [delta async for delta in engine.generate(request([1], max_completion_length=25))]
    assert [list(delta.token_ids) for delta in deltas] == [list(range(10)), list(range(10, 20)), list(range(20, 25))]
    assert [delta.finish_reason for delta in deltas] == [None, None, FinishReason.LENGTH]
    assert decoder.threads.isdisjoint({threading.get_ident()})


async def test_a_request_can_get_single_tokens_while_others_get_chunks(engine: ThreadedEngine) -> None:
    single = replace(request([1], max_completion_length=12), chunk_tokens=1)
    others = [sample(engine, [1], max_completion_length=12) for _ in range(2)]
    deltas, *_ = await asyncio.gather(_deltas(engine, single), *others)
    assert deltas == [[number] for number in range(12)]


async def _deltas(engine: ThreadedEngine, wanted: GenerationRequest) -> list[list[int]]:
    return [[*delta.token_ids] async for delta in engine.generate(wanted)]


@pytest.mark.parametrize("ahead", [False, True])
async def test_every_delta_is_of_one_version(engine: ThreadedEngine, decoder: CountingDecoder, ahead: bool) -> None:
    decoder.ahead = ahead
    runs = [asyncio.create_task(sample(engine, [1], max_completion_length=600 + n)) for n in range(4)]
    for number in range(1, 6):
        await asyncio.sleep(10 * PAUSE_S)
        await engine.adopt(Path(str(number)), PolicyVersion(1, number))
    for run in runs:
        result = await run
        assert result.tokens == list(range(len(result.tokens)))
        assert [version.number for version in result.versions] == [int(mark) for mark in result.logprobs]
        assert len(result.spans()) >= 3


async def test_after_adopt_returns_only_the_new_version_samples(engine: ThreadedEngine) -> None:
    await engine.adopt(Path("7"), PolicyVersion(1, 7))
    result = await sample(engine, [1], max_completion_length=3)
    assert result.spans() == [(PolicyVersion(1, 7), 0, 3)]


async def test_refused_weights_leave_the_version(engine: ThreadedEngine) -> None:
    with pytest.raises(WeightsError):
        await engine.adopt(Path("bad"), PolicyVersion(1, 9))
    assert set((await sample(engine, [1], max_completion_length=3)).versions) == {PolicyVersion(0, 0)}


async def test_one_wakeup_per_step(engine: ThreadedEngine, decoder: CountingDecoder) -> None:
    loop = asyncio.get_running_loop()
    wakeups = 0
    original = loop.call_soon_threadsafe

    def counting(*args: object, **kwargs: object) -> object:
        nonlocal wakeups
        wakeups += 1
        return original(*args, **kwargs)  # type: ignore[arg-type]

    loop.call_soon_threadsafe = counting  # type: ignore[method-assign, assignment]
    try:
        await asyncio.gather(*(sample(engine, [1], max_completion_length=50) for _ in range(50)))
    finally:
        loop.call_soon_threadsafe = original  # type: ignore[method-assign]
    assert wakeups <= decoder.steps


async def test_closing_the_iterator_frees_the_slot(engine: ThreadedEngine, decoder: CountingDecoder) -> None:
    stream = engine.generate(request([1], max_completion_length=4000))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    await sample(engine, [1], max_completion_length=3)
    assert decoder.running == []


async def test_a_cancelled_reader_frees_the_slot(engine: ThreadedEngine, decoder: CountingDecoder) -> None:
    reader = asyncio.create_task(sample(engine, [1], max_completion_length=4000))
    await asyncio.sleep(20 * PAUSE_S)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await sample(engine, [1], max_completion_length=3)
    assert decoder.running == []


async def test_a_failed_step_fails_the_running_and_serves_the_next(
    engine: ThreadedEngine, decoder: CountingDecoder
) -> None:
    decoder.fails_with = 3
    outcomes = await asyncio.gather(
        *(sample(engine, [1], max_completion_length=50) for _ in range(3)), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [EngineError] * 3
    assert "out of memory" in str(outcomes[0])
    assert len((await sample(engine, [1], max_completion_length=5)).tokens) == 5


async def test_a_request_the_decoder_refuses_fails_alone(engine: ThreadedEngine) -> None:
    good = asyncio.create_task(sample(engine, [1], max_completion_length=50))
    with pytest.raises(PromptRefused, match="no such prompt"):
        await sample(engine, [666], max_completion_length=5)
    assert len((await good).tokens) == 50


async def test_closing_fails_what_runs_and_refuses_what_comes(engine: ThreadedEngine, decoder: CountingDecoder) -> None:
    running = asyncio.create_task(sample(engine, [1], max_completion_length=4000))
    await asyncio.sleep(10 * PAUSE_S)
    await engine.close()
    await engine.close()
    assert decoder.closed
    with pytest.raises(EngineError):
        await running
    with pytest.raises(EngineError):
        await sample(engine, [1], max_completion_length=5)
    with pytest.raises(EngineError):
        await engine.adopt(Path("1"), PolicyVersion(1, 1))


async def test_an_engine_whose_decoder_is_lost_ends(engine: ThreadedEngine, decoder: CountingDecoder) -> None:
    running = asyncio.create_task(sample(engine, [1], max_completion_length=4000))
    await asyncio.sleep(10 * PAUSE_S)
    decoder.lost = True
    with pytest.raises(EngineError, match="has ended: its process was killed; repeat the request elsewhere"):
        await running
    with pytest.raises(EngineError, match="got one that has not started or has ended: its process was killed"):
        await sample(engine, [1], max_completion_length=5)


async def test_weights_that_break_the_device_end_the_engine(engine: ThreadedEngine) -> None:
    running = asyncio.create_task(sample(engine, [1], max_completion_length=4000))
    await asyncio.sleep(10 * PAUSE_S)
    with pytest.raises(EngineError, match="device lost"):
        await engine.adopt(Path("101"), PolicyVersion(1, 1))
    with pytest.raises(EngineError):
        await running


async def test_a_model_that_does_not_load_is_the_callers_error(decoder: CountingDecoder) -> None:
    decoder.unloadable = ModelError("expected a model, got none")
    engine = ThreadedEngine(decoder, max_num_seqs=1)
    with pytest.raises(ModelError):
        await engine.start()
    with pytest.raises(EngineError):
        await sample(engine, [1], max_completion_length=1)
    await within(engine.close(), 5)


async def test_a_start_that_times_out_leaves_no_thread(decoder: CountingDecoder) -> None:
    decoder.loads_until_given_up = True
    engine = ThreadedEngine(decoder, max_num_seqs=1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.start(), 0.05)
    await until(lambda: not _engine_threads(), timeout_s=60)


async def test_an_engine_that_is_closed_while_it_loads_leaves_no_thread(decoder: CountingDecoder) -> None:
    decoder.loads_until_given_up = True
    engine = ThreadedEngine(decoder, max_num_seqs=1)
    starting = asyncio.create_task(engine.start())
    await until(lambda: bool(_engine_threads()), timeout_s=60)
    await engine.close()
    assert not _engine_threads()
    with pytest.raises(ModelError):
        await starting


async def test_a_cancelled_load_of_weights_is_abandoned_before_the_next_one_starts(
    engine: ThreadedEngine, decoder: CountingDecoder
) -> None:
    decoder.reads_until_given_up = True
    adopting = asyncio.create_task(engine.adopt(Path("1"), PolicyVersion(1, 1)))
    await until(lambda: decoder.reading == 1, timeout_s=60)
    other = asyncio.create_task(engine.adopt(Path("2"), PolicyVersion(1, 2)))
    adopting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await adopting
    assert decoder.given_up.is_set()
    await other
    assert (decoder.reading, decoder.most_reading, decoder.weights) == (0, 1, 2.0)


async def test_a_cancelled_close_leaves_no_thread(engine: ThreadedEngine, decoder: CountingDecoder) -> None:
    before = set(threading.enumerate())
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await until(lambda: not _engine_threads(), timeout_s=60)
    assert decoder.closed
    assert set(threading.enumerate()) <= before


def _engine_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "counting-engine"]
