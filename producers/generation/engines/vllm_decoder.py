"""The vLLM decoder: vLLM's own engine core in processes of its own, spoken to by our engine's thread.

The core schedules, computes and samples on without waiting for this process, a step ahead of its own outputs on a GPU
(vLLM's async scheduling). They are read as the core sends them, before the layer that makes request outputs for users
(vLLM's OutputProcessor), which costs 3 to 9 microseconds a token and tells nothing more here. Every message of outputs
says which weights it was sampled with; that these are the ones we take it for is checked each time.

Weights are put in place while the core is paused: what it had begun is finished first and comes as the old version's,
then nothing is scheduled until it is resumed. Keys and values stay, or are given up while nothing is scheduled, with
which the core puts all that runs back among what waits: it prefills tokens so far anew when it is resumed.
The vllm package is imported when the engine is built, never before.
"""

import asyncio
import atexit
import importlib.util
import os
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Awaitable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from streamrl.producers.generation.engines.model_files import (
    ModelFacts,
    PublishedAdapter,
    check_sent,
    check_weights,
    one_line,
    read_adapter,
    read_facts,
)
from streamrl.producers.generation.engines.port import ActiveCompletion, DecoderLost, GenerationRequest
from streamrl.producers.generation.engines.vllm_group import EngineGroup, RankExtension
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.schemas.errors import EngineError, ModelError, PromptRefused, WeightsError
from streamrl.schemas.trajectories import FinishReason, SamplingParams
from streamrl.weights.turns import SendingTurn, TurnAsker, read_sent

# What vLLM takes from the environment alone, here and in its processes. It looks again and again, at its import, for
# each process and while it serves, so no moment is right for taking it back; and it is the same for every engine.
_ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of this threaded process could deadlock, and lacks CUDA
    "VLLM_NO_USAGE_STATS": "1",  # by default vLLM reports to its makers
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # standard output belongs to whoever runs us
    "VLLM_PLUGINS": "",  # none: whatever else is installed must not change what is sampled
}
_UNLESS_SET = {"VLLM_LOGGING_LEVEL": "ERROR"}  # its warnings recur with every adoption of weights
_ENVIRONMENT_OF_A_CPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a single rank within the core's process: one import of vLLM less
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # workers share the machine; each binding to the first cores would not
}
_SOCKETS = "VLLM_RPC_BASE_PATH"
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
# What an engine's processes alone have.
_IN_PROCESSES = {"VLLM_OMP_NUM_THREADS_SET_BY_VLLM": "0"}  # the number of threads is ours, and vLLM keeps to it
_IN_PROCESSES_OF_A_CPU = {"TORCHDYNAMO_DISABLE": "1"}  # compiling two small sampling functions costs more than it saves
_TASKS = ("generate",)
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_DEFAULT_CPU_CACHE = 256 << 20
_BLOCK = 128  # tokens of one block of vLLM's key-value cache on a CPU
_EXTENSION = f"{RankExtension.__module__}.{RankExtension.__name__}"
_RECEIVING = "streamrl.producers.generation.engines.vllm_transfer.ReceivingExtension"
"""By name: its module imports vLLM."""
_LORA, _LORA_RANKS = "policy", (8, 16, 32, 64, 128, 256, 320, 512)
_END_S = 0.5
"""The processes are asked to end, and after so long killed: they hold nothing that has to be put away."""
_LOOK_S = 1.0
"""How often a call to the core is interrupted to see whether there still is one."""

ResultT = TypeVar("ResultT")


class VllmDecoder:
    """A ``Decoder`` over vLLM, on a GPU (package vllm) or a CPU (package vllm-cpu).

    What prompts have in common at their beginning is prefilled once, by whole blocks of the key-value cache, as long as
    the weights stay the same: ``cached_prompt_tokens`` of ``prompt_tokens`` came from the cache so far.
    ``keeps_to_schemas``: requests may have JSON schemas, for which vLLM needs the model's tokenizer.
    """

    name = "vllm"

    def __init__(
        self,
        model_path: str,
        settings: GenerationSettings,
        sampling: SamplingParams | None = None,
        lora_rank: int = 0,
        *,
        keeps_to_schemas: bool = False,
        transfer: str = "",
    ) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ModelError(
                "expected the vllm package for generation.engine = vllm, got none installed; "
                "run `make demo ENGINE=vllm`, which sets it up, or install requirements-vllm.txt"
            )
        set_vllm_environment(settings.threads)
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
        self._keeps_to_schemas = keeps_to_schemas
        self._transfer = transfer
        self._turns = TurnAsker(secrets.token_hex(16), settings.devices_per_worker, settings.fetch_timeout_s)
        self._lora_request: Any = None
        self._facts: ModelFacts
        self._vllm: Any = None
        self._config: Any = None
        self._inputs: Any = None
        self._core: Any = None
        self._group = EngineGroup(process_environment(settings.threads))
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def kv_tokens(self) -> int | None:
        """See ``Decoder``."""
        if self._core is None:
            return None
        cache, cores = self._config.cache_config, self._settings.data_parallel_size
        # Where layers differ in what they keep, blocks times their size are not the tokens; vLLM has counted them then,
        # for one core, while blocks are those of all cores.
        return (cache.kv_cache_size_tokens or 0) * cores or (cache.num_gpu_blocks or 0) * cache.block_size or None

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._running)

    def load(self) -> ModelFacts:
        """See ``Decoder``."""
        self._facts = read_facts(self._model_path, self._settings.max_model_len)
        try:
            self._loop = asyncio.new_event_loop()
            self._loop.run_until_complete(self._open_core())
        except Exception as error:
            cause = self._group.errors.last() or one_line(error)
            self.close()
            raise ModelError(
                f"expected vLLM to load {self._model_path}, got: {cause}; its log is this worker's: "
                f"set VLLM_LOGGING_LEVEL=INFO to see more, or generation.engine to transformers"
            ) from error
        return self._facts

    async def _open_core(self) -> None:
        """A coroutine, for vLLM's client finds the loop of its sockets by itself; it waits for the core."""
        import vllm
        from vllm.inputs.engine import tokens_input
        from vllm.platforms import current_platform
        from vllm.renderers import renderer_from_config
        from vllm.v1.engine.core_client import EngineCoreClient
        from vllm.v1.engine.input_processor import InputProcessor
        from vllm.v1.executor import Executor

        self._vllm, self._tokens_input = vllm, tokens_input
        arguments = vllm.EngineArgs(**self._arguments(on_cpu=current_platform.is_cpu()))
        self._config = config = arguments.create_engine_config()
        self._inputs = InputProcessor(config, renderer_from_config(config))
        with self._group.spawning():
            self._core = EngineCoreClient.make_async_mp_client(config, Executor.get_class(config), log_stats=False)
        if self._heat is not None:
            await self._core.collective_rpc_async(RankExtension.divide_logits.__name__, args=(self._heat,))
        await self._core.set_weight_version_async(str(self._adoptions))

    def give_up(self) -> None:
        """See ``Decoder``."""
        if self._core is None:  # what is loaded is ended by its own thread, see close
            self._group.kill()
        self._turns.give_up()

    def _call(self, call: Awaitable[ResultT]) -> ResultT:
        """The answer of the core to a call of its client.

        Raises:
            DecoderLost: a process of the engine has ended.
        """

        async def answered() -> ResultT:
            answer = asyncio.ensure_future(call)
            # vLLM's client leaves calls without an answer waiting when the core ends.
            while not (await asyncio.wait((answer,), timeout=_LOOK_S))[0]:
                self._core.ensure_alive()
            return await answer

        assert self._loop is not None, "made when the model is loaded"
        try:
            return self._loop.run_until_complete(answered())
        except Exception as error:
            if not self._core.resources.engine_dead:
                raise
            told = self._group.errors.last()
            cause = f"whose last error was {told}" if told else "which logged no error"
            raise DecoderLost(f"a process of vLLM's ended, {cause}; its log is this worker's") from error

    def queue(self, completion: ActiveCompletion) -> None:
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
            structured_outputs=self._structure(completion.request),
            stop_token_ids=sorted(self._facts.eos_token_ids),
            # Else the tokenizer's own end token would end completions, too, of a model that has another. A whole JSON
            # value has to end somehow.
            ignore_eos=not completion.request.json_schema,
            logprobs=0,
            detokenize=False,
        )
        # The salt is hashed with the first block of a prompt, and each block with the one before: no block of other
        # weights is found.
        prompt = self._tokens_input(completion.request.context_token_ids, cache_salt=str(self._adoptions))
        try:
            request = self._inputs.process_inputs(name, prompt, parameters, _TASKS, lora_request=self._lora_request)
        except ValueError as error:
            if not completion.request.json_schema:
                raise
            said = f"expected a JSON schema that vLLM can hold a completion to, got: {one_line(error)}"
            raise PromptRefused("a JSON schema", said) from error
        self._call(self._core.add_request_async(request))
        self._running[name] = completion
        self._ids[completion] = name

    def _structure(self, request: GenerationRequest) -> Any:
        """What vLLM masks tokens by; none without a schema.

        Raises:
            PromptRefused: this engine was started without the tokenizer that it takes.
            EngineError: vLLM cannot go on within a JSON value.
        """
        if not request.json_schema:
            return None
        if not self._keeps_to_schemas:
            said = "expected no JSON schema by a worker that was started without slots for requests, got one"
            raise PromptRefused("a JSON schema", said)
        if request.prefix_token_ids:
            raise EngineError("a completion to a JSON schema that was begun elsewhere")
        return self._vllm.sampling_params.StructuredOutputsParams(json=request.json_schema)

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
            self._call(self._core.abort_requests_async([name]))

    def clear(self) -> None:
        """See ``Decoder``."""
        for completion in list(self._ids):
            self.drop(completion)

    def read_weights(self, directory: Path) -> "Path | PublishedAdapter | SendingTurn":
        """See ``Decoder``; what a sender is to send is waited for, and not read."""
        if (sent := read_sent(directory)) is not None:
            turn = self._turns.ask(sent)
            check_sent(turn.names, turn.dtype_names, turn.shapes, self._facts.tensors, f"what {sent.sender} sends")
            return turn
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

    def pause(self) -> Iterable[ActiveCompletion]:
        """See ``Decoder``; what the core had scheduled is sampled, and no step follows until weights were adopted."""
        recomputes = self._settings.adopt == "recompute"
        self._call(self._core.pause_scheduler_async(mode="keep", clear_cache=recomputes))
        # Each core answers behind its last outputs, on the same connection. They are taken in one by one, as a stop
        # string may end with any of them.
        while not self._core.outputs_queue.empty():
            yield from self.step()

    def adopt(self, weights: "Path | PublishedAdapter | SendingTurn") -> None:
        """See ``Decoder``; every rank of a tensor-parallel engine reads its own part of the files."""
        if isinstance(weights, PublishedAdapter):
            self._adopt_adapter(weights)
        elif isinstance(weights, SendingTurn):
            self._receive(weights)
        else:
            arguments = {"weights_path": str(weights.resolve())}
            self._call(self._core.collective_rpc_async("reload_weights", kwargs=arguments))
        self._adoptions += 1
        self._call(self._core.set_weight_version_async(str(self._adoptions)))
        # What has sampled nothing begins anew: else it would go on from keys and values of the old weights in the
        # cache, or leave new ones there under the old salt. In order of arrival, as they were.
        unstarted = [completion for completion in self._ids if not completion.has_sampled]
        for completion in unstarted:
            self.drop(completion)
        for completion in unstarted:
            self.queue(completion)
        self._call(self._core.resume_scheduler_async())

    def _receive(self, turn: SendingTurn) -> None:
        """Have every rank take what the sender sends by now."""

        def in_ranks(method: str, **arguments: Any) -> list[Any]:
            return self._call(self._core.collective_rpc_async(method, kwargs=arguments))

        if turn.meeting:
            in_ranks("shutdown_weight_transfer_engine")
            in_ranks("init_weight_transfer_engine", init_info=turn.meeting)
        in_ranks("sum_received")
        in_ranks("start_weight_update")
        in_ranks("update_weights", update_info=turn.update_info)
        in_ranks("finish_weight_update")
        expected = dict(zip(turn.names, turn.sums, strict=True))
        for rank, sums in enumerate(in_ranks("received_sums")):
            if wrong := [name for name, expected_sum in expected.items() if sums.get(name) != expected_sum]:
                raise EngineError(f"expected {wrong[0]} as it was sent, got another sum of it in rank {rank}")

    def _adopt_adapter(self, adapter: PublishedAdapter) -> None:
        """Put it in the place of the one before, also for what runs: they share a name and a number."""
        from vllm.lora.request import LoRARequest

        path = str(adapter.directory.resolve())
        # Only here in place: a request that said so would load it anew at every step.
        if not self._call(self._core.add_lora_async(LoRARequest(_LORA, 1, path, load_inplace=True))):
            raise EngineError(f"expected vLLM to load the adapter in {path}, and it did not; see its log")
        self._lora_request = LoRARequest(_LORA, 1, path)

    def close(self) -> None:
        """See ``Decoder``."""
        core, self._core = self._core, None
        loop, self._loop = self._loop, None
        try:
            if core is not None:
                core.shutdown(timeout=_END_S)
        finally:
            self._group.close()
            if loop is not None:
                # Sockets and tasks of the client are closed by the loop, which has to come to it.
                loop.run_until_complete(asyncio.sleep(0))
                loop.close()
            if core is not None:
                core.resources.ctx.destroy(linger=0)

    def step(self) -> Iterable[ActiveCompletion]:
        """See ``Decoder``; with several cores, a step of one of them."""
        advanced = []
        outputs = self._call(self._core.get_output_async())
        for output in outputs.outputs:
            completion = self._running.get(output.request_id)
            if completion is None:
                continue
            if output.prefill_stats is not None:
                self.prompt_tokens += output.prefill_stats.num_prompt_tokens
                self.cached_prompt_tokens += output.prefill_stats.num_cached_tokens
            if output.new_token_ids:
                if outputs.weight_version != str(self._adoptions):
                    raise EngineError(f"tokens of weights {self._adoptions}, got some of {outputs.weight_version}")
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
            "max_num_seqs": -(-settings.max_num_seqs // settings.data_parallel_size),
            "max_num_batched_tokens": max(settings.max_num_batched_tokens, settings.max_num_seqs),
            "kv_cache_memory_bytes": settings.kv_cache_memory_bytes or (self._cpu_cache() if on_cpu else None),
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "tensor_parallel_size": settings.tensor_parallel_size,
            "data_parallel_size": settings.data_parallel_size,
            "worker_extension_cls": _RECEIVING if self._transfer else _EXTENSION,
            "enable_batch_sharded_sampling": False,  # it would pass by the model's compute_logits, see divide_logits
            "enforce_eager": on_cpu if settings.enforce_eager is None else settings.enforce_eager,
            "logprobs_mode": "processed_logprobs" if self._heat is None else "raw_logprobs",
            "generation_config": "vllm",
            "enable_prefix_caching": True,
            "async_scheduling": not on_cpu,
            "skip_tokenizer_init": not self._keeps_to_schemas,
            # One by name: left to itself vLLM takes for all requests what its first one needed.
            "structured_outputs_config": {"backend": "xgrammar"},
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "seed": secrets.randbelow(1 << 31),
            **self._lora_arguments(),
            **({"weight_transfer_config": {"backend": self._transfer}} if self._transfer else {}),
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


def set_vllm_environment(threads: int = 1) -> None:
    """Set for this process, for good, what vLLM reads; called before an engine has a thread of its own.

    What a user set for vLLM's log is kept; the rest would break the engine and is overridden.
    """
    on_cpu = _is_built_for_cpus()
    os.environ.update(_ENVIRONMENT | (_ENVIRONMENT_OF_A_CPU if on_cpu else {}))
    # Without a number, vLLM on a GPU sets one, here and in torch, while a process starts, and takes it back.
    for name, value in (_UNLESS_SET if on_cpu else _UNLESS_SET | {"OMP_NUM_THREADS": str(threads)}).items():
        os.environ.setdefault(name, value)
    if _SOCKETS not in os.environ:
        # vLLM puts its sockets there and leaves them behind.
        os.environ[_SOCKETS] = directory = tempfile.mkdtemp(prefix="streamrl-vllm-")
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
    # Of other libraries' interfaces that vLLM's own modules still use: no user can act on them. Filters are the
    # process's, so no thread may put them back.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")


def process_environment(threads: int) -> dict[str, str]:
    """What the processes of an engine have besides, with so many CPU ``threads`` a rank."""
    # What torch has compiled is kept for the next engine: by default it lies among the temporary files, which are not.
    compiled = os.environ.get(_COMPILED, os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}"))
    own = {"OMP_NUM_THREADS": str(threads), _COMPILED: compiled}
    return _IN_PROCESSES | (_IN_PROCESSES_OF_A_CPU if _is_built_for_cpus() else {}) | own


def _is_built_for_cpus() -> bool:
    """Whether the installed vLLM is the build for CPUs, by its package's name or version, as vLLM itself looks.

    Torch is not asked for a device: that initialises CUDA's driver in this process, and a process forked from it would
    have none; nor is vLLM, which reads its environment while it is imported.
    """
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return True  # vllm-cpu
