"""The vLLM decoder: vLLM's own engine core, stepped by our engine thread in the same process.

In one process because then vLLM is imported once instead of three times (front, core, CPU worker), and every step's
outputs belong to the version in force. They are read as the core returns them, before the layer that makes request
outputs for users (vLLM's OutputProcessor), which costs 3 to 9 microseconds a token and tells nothing more here. Only
tensor parallelism has processes of its own, one a rank, which the kernel ends with the engine's thread.
The vllm package is imported when the engine is built, never before.
"""

import ctypes
import importlib.util
import os
import secrets
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from producers.generation.engines.adapter_files import PublishedAdapter, read_adapter
from producers.generation.engines.model_files import ModelFacts, check_weights, one_line, read_facts
from producers.generation.engines.threaded import ActiveCompletion
from producers.generation.settings import GenerationSettings
from schemas.errors import EngineError, ModelError, WeightsError
from schemas.trajectories import FinishReason, SamplingParams

# What vLLM takes from the environment alone, while it is imported and its engine is made.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process, see above
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # ranks: a fork of this threaded process could deadlock, and lacks CUDA
    "VLLM_NO_USAGE_STATS": "1",  # by default vLLM reports to its makers
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # standard output belongs to whoever runs us
    "VLLM_PLUGINS": "",  # none: whatever else is installed must not change what is sampled
    "VLLM_LOGGING_LEVEL": "ERROR",  # unless the user set it: its warnings recur with every adoption of weights
}
_ENVIRONMENT_OF_A_CPU = {
    "TORCHDYNAMO_DISABLE": "1",  # compiling two small sampling functions costs more than it saves
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # workers share the machine; each binding to the first cores would not
}
_TASKS = ("generate",)
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_DEFAULT_CPU_CACHE = 256 << 20
_BLOCK = 128  # tokens of one block of vLLM's key-value cache on a CPU
_LORA, _LORA_RANKS = "policy", (8, 16, 32, 64, 128, 256, 320, 512)
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class VllmDecoder:
    """A ``Decoder`` over vLLM, on a GPU (package vllm) or a CPU (package vllm-cpu).

    What prompts have in common at their beginning is prefilled once, by whole blocks of the key-value cache, as long as
    the weights stay the same: ``cached_prompt_tokens`` of ``prompt_tokens`` came from the cache so far.
    """

    name = "vllm"

    def __init__(
        self,
        model_path: str,
        settings: GenerationSettings,
        sampling: SamplingParams | None = None,
        lora_rank: int = 0,
    ) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ModelError(
                "expected the vllm package for generation.engine = vllm, got none installed; "
                "run `make demo ENGINE=vllm`, which sets it up, or install requirements-vllm.txt"
            )
        self._model_path = model_path
        self._settings = settings
        # vLLM tells log-probabilities from behind temperature, min-p, top-k and top-p or from before them all. So where
        # requests truncate, it is the latter, of logits that the model itself has divided by this temperature.
        self._heat = sampling.temperature if sampling is not None and sampling.truncates else None
        self.prompt_tokens = self.cached_prompt_tokens = 0
        self._running: dict[str, ActiveCompletion] = {}
        self._ids: dict[ActiveCompletion, str] = {}
        self._count = 0
        self._adoptions = 0
        self._lora_rank = lora_rank
        self._lora_request: Any = None
        self._facts: ModelFacts
        self._vllm: Any = None
        self._engine: Any = None

    @property
    def kv_tokens(self) -> int | None:
        """See ``Decoder``."""
        if self._engine is None:
            return None
        cache = self._engine.vllm_config.cache_config
        # Where layers differ in what they keep, blocks times their size are not the tokens; vLLM has counted them then.
        return cache.kv_cache_size_tokens or (cache.num_gpu_blocks or 0) * cache.block_size or None

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._running)

    def load(self) -> ModelFacts:
        """See ``Decoder``."""
        torch.set_num_threads(self._settings.threads)
        self._facts = read_facts(self._model_path, self._settings.max_model_len)
        try:
            with vllm_environment(self._settings.threads), warnings.catch_warnings():
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
        from vllm.v1.engine.llm_engine import LLMEngine

        self._vllm, self._tokens_input = vllm, tokens_input
        engine = LLMEngine.from_engine_args(vllm.EngineArgs(**self._arguments(on_cpu=current_platform.is_cpu())))
        if self._settings.tensor_parallel_size > 1:
            # Ranks that notice by themselves that we are gone take seconds, with all of their memory.
            engine.collective_rpc(_die_with_the_engine)
        if self._heat is not None:
            engine.apply_model(partial(heat_logits, temperature=self._heat))
        return engine

    def add(self, completion: ActiveCompletion) -> None:
        """See ``Decoder``."""
        self._count += 1
        name = str(self._count)
        wanted = completion.request.sampling
        parameters = self._vllm.SamplingParams(
            max_tokens=completion.limit - len(completion.request.prefix_token_ids),
            temperature=self._temperature(wanted),
            top_p=wanted.top_p,
            top_k=wanted.top_k,
            min_p=wanted.min_p,
            seed=wanted.seed,
            stop_token_ids=sorted(self._facts.eos_token_ids),
            logprobs=0,
            detokenize=False,
        )
        # The salt is hashed with the first block of a prompt, and each block with the one before: no block of other
        # weights is found.
        prompt = self._tokens_input(completion.request.context_token_ids, cache_salt=str(self._adoptions))
        request = self._engine.input_processor.process_inputs(
            name, prompt, parameters, _TASKS, lora_request=self._lora_request
        )
        self._engine.engine_core.add_request(request)
        self._running[name] = completion
        self._ids[completion] = name

    def _temperature(self, wanted: SamplingParams) -> float:
        """What vLLM has still to divide the logits by; 0 takes the likeliest token.

        Raises:
            EngineError: log-probabilities of such a request would not be those the trainer computes.
        """
        if self._heat is None and wanted.truncates:
            raise EngineError("top_p, top_k or min_p in a request to a worker that was started without; restart it")
        if self._heat is None or wanted.temperature == 0.0:
            return wanted.temperature
        if wanted.temperature != self._heat:
            raise EngineError(
                f"a request at temperature {wanted.temperature} to a worker that was started, with top_p, top_k or "
                f"min_p, for {self._heat}; restart it"
            )
        return 1.0

    def drop(self, completion: ActiveCompletion) -> None:
        """See ``Decoder``."""
        name = self._ids.pop(completion, None)
        if name is not None:
            del self._running[name]
            self._engine.engine_core.abort_requests([name])

    def clear(self) -> None:
        """See ``Decoder``."""
        for completion in list(self._ids):
            self.drop(completion)

    def read_weights(self, directory: Path) -> "Path | PublishedAdapter":
        """See ``Decoder``."""
        adapter = read_adapter(directory, self._facts.tensors, self._model_path)
        if adapter is None:
            check_weights(directory, self._facts.tensors)
            return directory
        if adapter.rank > self._lora_rank:
            raise WeightsError(
                f"expected an adapter of rank {self._lora_rank} at most, as this worker was started for, got "
                f"{adapter.rank}; set training.lora.rank for the workers too"
            )
        return adapter

    def adopt(self, weights: "Path | PublishedAdapter") -> None:
        """See ``Decoder``; every rank of a tensor-parallel engine reads its own part of the files."""
        if isinstance(weights, PublishedAdapter):
            self._adopt_adapter(weights)
        else:
            self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(weights.resolve())})
        self._adoptions += 1
        # What has sampled nothing begins anew: else it would go on from keys and values of the old weights in the
        # cache, or leave new ones there under the old salt. In order of arrival, as they were.
        unstarted = [completion for completion in self._ids if not completion.has_sampled]
        for completion in unstarted:
            self.drop(completion)
        for completion in unstarted:
            self.add(completion)

    def _adopt_adapter(self, adapter: PublishedAdapter) -> None:
        """Put it in the place of the one before, also for what runs: they share a name and a number."""
        from vllm.lora.request import LoRARequest

        path = str(adapter.directory.resolve())
        # Only here in place: a request that said so would load it anew at every step.
        if not self._engine.add_lora(LoRARequest(_LORA, 1, path, load_inplace=True)):
            raise EngineError(f"expected vLLM to load the adapter in {path}, and it did not; see its log")
        self._lora_request = LoRARequest(_LORA, 1, path)

    def close(self) -> None:
        """See ``Decoder``."""
        if self._engine is not None:
            self._engine.engine_core.shutdown()
            self._engine = None

    def step(self) -> Iterable[ActiveCompletion]:
        """See ``Decoder``."""
        advanced = []
        for output in self._engine.engine_core.get_output().outputs:
            completion = self._running.get(output.request_id)
            if completion is None:
                continue
            if output.prefill_stats is not None:
                self.prompt_tokens += output.prefill_stats.num_prompt_tokens
                self.cached_prompt_tokens += output.prefill_stats.num_cached_tokens
            if output.new_token_ids:
                # One row a token; the first column is of the token that was sampled.
                completion.extend(output.new_token_ids, output.new_logprobs.logprobs[:, 0].tolist())
            if output.finish_reason is not None:
                completion.finish_reason = _FINISH.get(str(output.finish_reason), FinishReason.ABORT)
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
            "enable_batch_sharded_sampling": False,  # it would pass by the model's compute_logits, see heat_logits
            "enforce_eager": on_cpu if settings.enforce_eager is None else settings.enforce_eager,
            "logprobs_mode": "processed_logprobs" if self._heat is None else "raw_logprobs",
            "generation_config": "vllm",
            "enable_prefix_caching": True,
            # Weights change between steps: with one in flight, its tokens would be named after the wrong version.
            "async_scheduling": False,
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "seed": secrets.randbelow(1 << 31),
            **self._lora_arguments(),
        }

    def _lora_arguments(self) -> dict[str, Any]:
        if not self._lora_rank:
            return {}
        # vLLM knows a few ranks, and pads smaller adapters to one of them.
        rank = next(known for known in _LORA_RANKS if known >= self._lora_rank)
        return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": rank}

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
def vllm_environment(threads: int = 1) -> Iterator[None]:
    """Set what vLLM reads, for as long as it loads; then the process has its own environment back.

    Programs that the process starts later see nothing of it; ranks of a tensor-parallel engine start within it, with
    so many CPU ``threads`` each. What a user set for vLLM's log is kept; the rest would break the engine and is
    overridden.
    """
    wanted = _ENVIRONMENT | (_ENVIRONMENT_OF_A_CPU if _is_built_for_cpus() else {}) | {"OMP_NUM_THREADS": str(threads)}
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


def _is_built_for_cpus() -> bool:
    """Whether the installed vLLM is the build for CPUs, by its package's name or version, as vLLM itself looks.

    Torch is not asked for a device: that initialises CUDA's driver in this process, and a process forked from it would
    have none; nor is vLLM, which reads its environment while it is imported.
    """
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return True  # vllm-cpu


def heat_logits(model: Any, temperature: float) -> None:
    """Have a vLLM model's ``compute_logits`` return them divided by a temperature, in float32; runs in every rank.

    ``compute_logits`` is what vLLM asks of every model that generates; loading new weights leaves ours in its place.
    """
    plain = model.compute_logits

    def compute_logits(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        logits: torch.Tensor | None = plain(*args, **kwargs)
        # None: of a tensor-parallel model's ranks only the first has them.
        return None if logits is None else logits.float() / temperature

    model.compute_logits = compute_logits


def _die_with_the_engine(rank: Any) -> None:
    """Ask Linux for SIGKILL at the end of the thread that started this rank, the engine's; runs in every rank."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
