"""``python -m benchmarks.engine.direct MODEL SETTINGS FRONT``: vLLM alone, asked by lines on standard input.

A line holds a stretch's prompts as token ids and their limits; the answer tells its tokens, seconds and processor time.
*FRONT* ``inside``: vLLM's engine core in this process; ``outside``: in processes of its own, which is vLLM's default.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.spending import cpu_s_of
from streamrl.producers.generation.engines.vllm_decoder import process_environment, set_vllm_environment
from streamrl.producers.generation.settings import GenerationSettings


def open_vllm(model: str, settings: GenerationSettings, front: str) -> Any:
    """The library as its users have it, with the engine settings that our worker gives it."""
    set_vllm_environment(settings.threads)
    os.environ.update(process_environment(settings.threads))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if front == "outside" else "0"
    from vllm import LLM

    return LLM(
        model=model,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
        enforce_eager=True,
        generation_config="vllm",
        skip_tokenizer_init=True,
        seed=0,
    )


def stretch(llm: Any, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> dict[str, float]:
    """Sample a completion with log-probabilities for each prompt."""
    from vllm import SamplingParams

    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    sampling = [
        SamplingParams(max_tokens=limit, logprobs=0, flat_logprobs=True, detokenize=False, ignore_eos=True)
        for limit in limits
    ]
    spent, began = cpu_s_of([os.getpid()]), time.perf_counter()
    outputs = llm.generate(asked, sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    return {
        "tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "seconds": seconds,
        "cpu_s": cpu_s_of([os.getpid()]) - spent,
    }


def main(model: str, settings: str, front: str) -> None:
    """Answer stretches until standard input ends."""
    llm = open_vllm(model, GenerationSettings(**json.loads(settings)), front)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(stretch(llm, **json.loads(line))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
