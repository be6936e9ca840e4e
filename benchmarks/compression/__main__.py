"""``python -m benchmarks.compression``: bytes, processor time and throughput of trajectories by codec.

Records are what a text model leaves: English prose and code of Python's own library as text, its tokens by a BPE
vocabulary learnt from it, and the log-probabilities of a sampler whose logits were bfloat16. No two records share text.
"""

import argparse
import asyncio
import json
import random
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.conditions import conditions
from benchmarks.transport.workload import Ended, as_message
from streamrl.bus.embedded.cluster import start_cluster
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.limits import LIMITS
from streamrl.bus.kafka.records import GZIP, LZ4, SNAPPY, ZSTD, SafeRecords
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.kafka.topic_admin import apply_topics
from streamrl.bus.port import Outgoing
from streamrl.inspection.process import tune_garbage_collector
from streamrl.schemas.codec import decode
from streamrl.schemas.topics import TRAJECTORIES
from streamrl.schemas.trajectories import Trajectory

RESULTS = Path(__file__).parents[1] / "results" / "compression.json"
NUMBERS = {"none": 0, "lz4": LZ4, "zstd": ZSTD, "gzip": GZIP, "snappy": SNAPPY}
CODECS = tuple(NUMBERS)
TOKENS = (200, 2_000, 32_000, 200_000)
VOCABULARY = 49_152
PROMPT_TOKENS = 150
TOKENS_OF_A_SIZE = 200_000
"""As many different records of each size as that makes: at least two."""
ROUND_TOKENS = 400_000
"""Carried through the broker in one round of each size."""
COMMAND = "make bench-compression"


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compression", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--round-tokens", type=int, default=ROUND_TOKENS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    began = time.monotonic()
    tune_garbage_collector()
    corpus = Corpus(options.seed)
    pools = {tokens: corpus.trajectories(tokens, max(2, TOKENS_OF_A_SIZE // tokens)) for tokens in options.tokens}
    rows: list[dict[str, Any]] = []
    for tokens, pool in pools.items():
        for codec, found in both_sides(pool, options.repetitions).items():
            rows.append({"codec": codec, "tokens": tokens, **found})
            print(json.dumps(rows[-1]), flush=True)
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as folder, start_cluster(Path(folder)) as cluster:
        given = cluster.bootstrap_servers, pools, options.repetitions, options.round_tokens
        rates = asyncio.run(through_a_broker(*given))
    for row in rows:
        row |= rates[row["codec"], row["tokens"]]
    libraries = ("aiokafka", "cramjam", "msgpack", "pydantic", "numpy")
    result = {
        "conditions": [conditions(began, options.seed, libraries, COMMAND)],
        "mean_logprob": round(corpus.mean_logprob, 3),
        "rows": rows,
    }
    options.results.write_text(json.dumps(result, indent=1) + "\n")
    return result


class Corpus:
    """Trajectories of any length, of text that is not repeated."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._text = "".join(_sources(seed))
        self._at = 0
        self._tokenizer = Tokenizer(models.BPE())
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()
        # A part of the text is enough to learn words from, and takes seconds; ids still spread over the vocabulary.
        trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False)
        self._tokenizer.train_from_iterator([self._text[: 3 << 20]], trainer)
        self.mean_logprob = float(sampled_logprobs(self._random, 10_000).mean())

    def trajectories(self, tokens: int, count: int) -> list[Trajectory]:
        """So many, of so many tokens each."""
        return [self._trajectory(tokens, index) for index in range(count)]

    def _trajectory(self, tokens: int, index: int) -> Trajectory:
        prompt, completion = self._next(PROMPT_TOKENS), self._next(tokens)
        ended = Ended(
            prompt_token_ids=prompt,
            token_ids=completion,
            logprobs=sampled_logprobs(self._random, tokens),
            loss_mask=np.ones(tokens, np.uint8),
        )
        texts = {"prompt_text": self._spelled(prompt), "completion_text": self._spelled(completion)}
        return as_message(ended, index).replace(**texts)

    def _next(self, tokens: int) -> NDArray[np.int32]:
        """The next tokens of the text, which begins anew when it ends."""
        found: list[int] = []
        while len(found) < tokens:
            if self._at >= len(self._text):
                self._at = 0
            # More characters than the tokens can need, so that one call mostly does; the rest of them is not consumed.
            piece = self._text[self._at : self._at + 8 * tokens]
            encoded = self._tokenizer.encode(piece, add_special_tokens=False)
            wanted = min(tokens - len(found), len(encoded.ids))
            self._at += encoded.offsets[wanted - 1][1]
            found += encoded.ids[:wanted]
        return np.array(found, np.int32)

    def _spelled(self, ids: NDArray[np.int32]) -> str:
        return str(self._tokenizer.decode(ids.tolist()))


def _sources(seed: int) -> Iterator[str]:
    """The files of Python's library, its manual's topics among them, in an order of their own."""
    # Not its tests: they repeat themselves far more than anything that a policy is asked for.
    library = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(library.rglob("*.py")) if not {"site-packages", "test", "tests"} & {*path.parts}]
    random.Random(seed).shuffle(files)
    for path in files:
        yield path.read_text(errors="replace")


def sampled_logprobs(random: np.random.Generator, tokens: int) -> NDArray[np.float32]:
    """Of tokens drawn from distributions of very different sharpness, computed as engines do: float32 [tokens] in nats.

    Most tokens of a reasoning model are all but certain and a fifth are open (arXiv 2506.01939); logits are bfloat16,
    whose digits show in the log-softmax.
    """
    # In pieces, or the alternatives of 200,000 tokens would not fit in memory.
    found = np.empty(tokens, np.float32)
    for start in range(0, tokens, 4096):
        count = min(4096, tokens - start)
        lead = np.where(random.random(count) < 0.8, random.gamma(4.0, 2.5, count), random.gamma(1.5, 0.7, count))
        others = np.sort(random.gumbel(0.0, 1.5, (count, 60)), axis=1)[:, ::-1]
        logits = random.normal(20.0, 3.0, (count, 1)) + np.column_stack([others[:, 0] + lead, others])
        rounded = _as_bfloat16(logits.astype(np.float32))
        normaliser = np.log(np.exp(rounded - rounded.max(axis=1, keepdims=True)).sum(axis=1, dtype=np.float32))
        logprobs = rounded - (rounded.max(axis=1) + normaliser)[:, None]
        # The largest of log p + Gumbel noise is a draw from p.
        drawn = (logprobs + random.gumbel(size=logprobs.shape)).argmax(axis=1)
        found[start : start + count] = logprobs[np.arange(count), drawn]
    return np.minimum(found, 0.0)


def _as_bfloat16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    # To the nearest: half of the last place that is kept is added before the lower 16 bits are cut off.
    return ((values.view(np.uint32) + 0x8000) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def both_sides(pool: Sequence[Trajectory], repetitions: int) -> dict[str, dict[str, float]]:
    """Bytes and processor time of a record by codec: alone in a batch, as at a worker's pace, and in full batches."""
    found: dict[str, dict[str, float]] = {codec: {} for codec in CODECS}
    for name, most in (("alone", 1), ("batched", len(pool))):
        times: dict[str, list[tuple[float, float]]] = {codec: [] for codec in CODECS}
        for _ in range(repetitions):
            # In turns, so that a slow moment of the machine hits every codec.
            for codec in CODECS:
                began = time.process_time()
                batches = write(pool, codec, most)
                done = time.process_time()
                read(batches)
                times[codec].append((done - began, time.process_time() - done))
                found[codec][f"bytes_{name}"] = round(sum(map(len, batches)) / len(pool))
        for codec, each in times.items():
            found[codec][f"write_us_{name}"] = round(1e6 * statistics.median(wrote for wrote, _ in each) / len(pool), 1)
            found[codec][f"read_us_{name}"] = round(1e6 * statistics.median(took for _, took in each) / len(pool), 1)
            found[codec][f"ratio_{name}"] = round(found["none"][f"bytes_{name}"] / found[codec][f"bytes_{name}"], 2)
    return found


def write(pool: Sequence[Trajectory], codec: str, most: int) -> list[bytes]:
    """Messages → record batches of at most ``most`` records, as a publisher fills them."""
    batches = [_builder(codec)]
    held = 0
    for message in pool:
        record = Outgoing.of("t", message, key=message.group_id)
        if held == most or not _append(batches[-1], held, record):
            batches.append(_builder(codec))
            held = 0
            _append(batches[-1], held, record)
        held += 1
    return [bytes(batch.build()) for batch in batches]


def _builder(codec: str) -> DefaultRecordBatchBuilder:
    return DefaultRecordBatchBuilder(
        magic=2,
        compression_type=NUMBERS[codec],
        is_transactional=False,
        producer_id=1,
        producer_epoch=0,
        base_sequence=0,
        batch_size=LIMITS.max_batch_bytes,
    )


def _append(builder: DefaultRecordBatchBuilder, offset: int, record: Outgoing) -> bool:
    key = None if record.key is None else record.key.encode()
    now_ms = int(1000 * time.time())
    return builder.append(offset, now_ms, key, record.value, list(record.headers)) is not None


def read(batches: Sequence[bytes]) -> None:
    """Record batches → messages, as a subscription and its reader do it."""
    for data in batches:
        records = SafeRecords(data)
        while (batch := records.next_batch()) is not None:
            for record in batch:
                assert isinstance(decode(record.value, tuple(record.headers)), Trajectory)


async def through_a_broker(
    address: str, pools: dict[int, list[Trajectory]], repetitions: int, round_tokens: int
) -> dict[tuple[str, int], dict[str, float]]:
    """Trajectories per second by codec and size: written until the broker has all, then read and decoded."""
    rates: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for repetition in range(repetitions):
        for tokens, pool in pools.items():
            # The first round of a size is not counted: it warms up the broker, and the code of the record's size.
            for turn, codec in enumerate((CODECS[0], *CODECS)):
                run = f"r{repetition}-{tokens}-{turn}"
                await apply_topics(address, run, 1)
                settings = KafkaSettings(bootstrap_servers=address, compression_type=codec)
                count = max(len(pool), round_tokens // tokens)
                rate = await _round(KafkaBus(settings), TRAJECTORIES.full_name(run), pool, count)
                if turn:
                    rates.setdefault((codec, tokens), []).append(rate)
    return {
        key: {
            "written_per_s": round(statistics.median(write for write, _ in each), 1),
            "read_per_s": round(statistics.median(read for _, read in each), 1),
        }
        for key, each in rates.items()
    }


async def _round(bus: KafkaBus, topic: str, pool: Sequence[Trajectory], count: int) -> tuple[float, float]:
    publisher = await bus.publisher("bench-worker")
    began = time.monotonic()
    for index in range(count):
        message = pool[index % len(pool)]
        await publisher.submit(Outgoing.of(topic, message, key=message.group_id, partition=0))
    await publisher.flush()
    written_s = time.monotonic() - began
    await publisher.close()
    # Opened only now, so that reading is timed by itself and not by the writer's pace.
    subscription = await bus.subscribe([topic], client_id="bench-trainer")
    began, found = time.monotonic(), 0
    while found < count:
        for record in await subscription.poll():
            found += isinstance(record.message(), Trajectory)
    read_s = time.monotonic() - began
    await subscription.close()
    return count / written_s, count / read_s


if __name__ == "__main__":
    main()
