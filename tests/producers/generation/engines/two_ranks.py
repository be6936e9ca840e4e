"""A vLLM engine of two ranks or two cores in a process of its own, for a test to kill: tells samples, then goes on.

``python -m tests.producers.generation.engines.two_ranks SIZE UNDECIDED FIRST SECOND THIRD``: the setting that is 2, and
model directories, adopted in turn. Of the first come truncated completions, a line of JSON; of the others some that
were sampled in flight, another.
"""

import asyncio
import dataclasses
import json
import sys
from pathlib import Path

from streamrl.producers.generation.engines.factory import build_engine
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import SamplingParams
from tests.producers.generation.engines.replay import PROMPTS, Sampled, sample, sample_and_adopt

PROMPT = [5, 6, 7, 8, 9]
TRUNCATION = {"top_p": 0.9, "top_k": 20, "min_p": 0.1}


async def main(size: str, directories: list[Path]) -> None:
    settings = GenerationSettings.model_validate({"engine": "vllm", "max_num_seqs": 16, size: 2})
    engine = build_engine(
        settings, directories[0], SamplingParams(max_completion_length=180, top_p=0.5), chunk_tokens=4
    )
    await engine.start()
    undecided, first, *others = [(PolicyVersion(1, number), directory) for number, directory in enumerate(directories)]
    await engine.adopt(undecided[1], undecided[0])
    truncated = [
        sample(engine, prompt, max_completion_length=40, seed=n, **TRUNCATION) for n, prompt in enumerate(PROMPTS)
    ]
    print(json.dumps([_told(one) for one in await asyncio.gather(*truncated)]), flush=True)
    await engine.adopt(first[1], first[0])
    beside = [asyncio.create_task(sample(engine, PROMPT, max_completion_length=170)) for _ in range(3)]
    adopting = await sample_and_adopt(engine, PROMPT, dict(others), max_completion_length=180)
    print(json.dumps([_told(one) for one in [adopting, *await asyncio.gather(*beside)]]), flush=True)
    while True:
        await sample(engine, PROMPT, max_completion_length=900)


def _told(sampled: Sampled) -> dict[str, object]:
    return dataclasses.asdict(sampled) | {"versions": [version.number for version in sampled.versions]}


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], [Path(each) for each in sys.argv[2:]]))
