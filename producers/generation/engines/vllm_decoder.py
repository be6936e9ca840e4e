"""The vLLM decoder: vLLM's own engine core in processes of its own, driven by our engine's thread.

The core schedules, computes and samples without waiting for this process; on a GPU it is a step ahead of its own
outputs (vLLM's async scheduling). We read outputs as the core sends them and skip vLLM's OutputProcessor, which costs 3
to 9 microseconds a token and adds nothing here. Every message of outputs names the weights that sampled it, and is
checked against the weights that we expect.

Weights are replaced while the core is paused. It first finishes its running steps, whose tokens belong to the old
version, and then schedules nothing until it is resumed. Keys and values are kept, or dropped during the pause. In the
second case the core moves all running requests back to its waiting ones, and prefills their tokens again when it is
resumed. The vllm package is imported when the engine is built, never before.
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
from streamrl.weights.fetch import SILENCE_S
from streamrl.weights.turns import SendingTurn, TurnAsker, read_sent

# Settings that vLLM reads from the environment only, here and in its processes. It reads them at import, for each
# process and while it serves, so they can never be removed again. They are the same for every engine.
_ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of this threaded process could deadlock, and lacks CUDA
    "VLLM_NO_USAGE_STATS": "1",  # by default vLLM sends usage statistics to its developers
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # standard output belongs to the process that runs us
    "VLLM_PLUGINS": "",  # none: other installed packages must not change sampling
}
_UNLESS_SET = {"VLLM_LOGGING_LEVEL": "ERROR"}  # its warnings recur with every adoption of weights
_ENVIRONMENT_OF_A_CPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a single rank in the core's own process saves one import of vLLM
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # workers share the machine, and must not all bind to the first cores
}
_SOCKETS = "VLLM_RPC_BASE_PATH"
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
# Variables that only an engine's processes have.
_IN_PROCESSES = {"VLLM_OMP_NUM_THREADS_SET_BY_VLLM": "0"}  # makes vLLM keep our number of threads
_IN_PROCESSES_OF_A_CPU = {"TORCHDYNAMO_DISABLE": "1"}  # compiling two small sampling functions costs more than it saves
_TASKS = ("generate",)
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_DEFAULT_CPU_CACHE = 256 << 20
_BLOCK = 128  # tokens of one block of vLLM's key-value cache on a CPU
_EXTENSION = f"{RankExtension.__module__}.{RankExtension.__name__}"
_RECEIVING = "streamrl.producers.generation.engines.vllm_transfer.ReceivingExtension"
"""Named as a string, because its module imports vLLM."""
_LORA, _LORA_RANKS = "policy", (8, 16, 32, 64, 128, 256, 320, 512)
_END_S = 0.5
"""Seconds after which processes that were asked to end are killed: they have nothing that needs to be saved."""
_LOOK_S = 1.0
"""Seconds between two checks, during a call to the core, that the core is alive."""

ResultT = TypeVar("ResultT")


class VllmDecoder:
    """A ``Decoder`` over vLLM, on a GPU (package vllm) or a CPU (package vllm-cpu).

    Common starts of prompts are prefilled once, in whole blocks of the key-value cache, while the weights stay the
    same: ``cached_prompt_tokens`` of ``prompt_tokens`` came from the cache so far. ``keeps_to_schemas``: requests may
    have JSON schemas, for which vLLM needs the model's tokenizer. For the other arguments see ``build_decoder``.
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
        # vLLM returns log-probabilities either after temperature, min-p, top-k and top-p, or before all of them. If
        # requests truncate, we use the latter, and the model itself divides its logits by this temperature.
        self._fixed_temperature = sampling.temperature if sampling is not None and sampling.truncates else None
        self.prompt_tokens = self.cached_prompt_tokens = 0
        self._running: dict[str, ActiveCompletion] = {}
        self._ids: dict[ActiveCompletion, str] = {}
        self._count = 0
        self._adoptions = 0
        self._lora_rank = lora_rank
        self._keeps_to_schemas = keeps_to_schemas
        self._transfer = transfer
        self._turns = TurnAsker(secrets.token_hex(16), settings.devices_per_worker, SILENCE_S)
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
        # If layers keep different numbers of tokens, blocks × block size is not the number of tokens. vLLM has counted
        # it then, for one core, while the number of blocks is that of all cores.
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
                f"expected vLLM to load {self._model_path}, got: {cause}; set VLLM_LOGGING_LEVEL=INFO to see more in "
                f"this worker's log, or set generation.engine to transformers"
            ) from error
        return self._facts

    async def _open_core(self) -> None:
        """Start the core and wait for it. A coroutine, because vLLM's client uses the running event loop."""
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
        if self._fixed_temperature is not None:
            await self._core.collective_rpc_async(RankExtension.divide_logits.__name__, args=(self._fixed_temperature,))
        await self._core.set_weight_version_async(str(self._adoptions))

    def give_up(self) -> None:
        """See ``Decoder``."""
        if self._core is None:  # a loaded core is ended by its own thread, see ``close``
            self._group.kill()
        self._turns.give_up()

    def _call(self, call: Awaitable[ResultT]) -> ResultT:
        """The core's answer to a call of its client.

        Raises:
            DecoderLost: a process of the engine has ended.
        """

        async def answered() -> ResultT:
            answer = asyncio.ensure_future(call)
            # When the core ends, vLLM's client does not end calls that wait for an answer.
            while not (await asyncio.wait((answer,), timeout=_LOOK_S))[0]:
                self._core.ensure_alive()
            return await answer

        assert self._loop is not None, "``load`` creates it"
        try:
            return self._loop.run_until_complete(answered())
        except Exception as error:
            if not self._core.resources.engine_dead:
                raise
            last_error = self._group.errors.last()
            cause = f"its last error was {last_error}" if last_error else "it logged no error"
            raise DecoderLost(f"a vLLM process ended, {cause}; see this worker's log") from error

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
            stop_token_ids=sorted(self._facts.ends.ids),
            # These are all ends, the tokenizer's too. With a JSON schema vLLM needs its own end token, since a complete
            # JSON value has to end.
            ignore_eos=not completion.request.json_schema,
            logprobs=0,
            detokenize=False,
        )
        # The salt is hashed into a prompt's first block, and each block's hash into the next one's. So blocks of other
        # weights are never found in the cache.
        prompt = self._tokens_input(completion.request.context_token_ids, cache_salt=str(self._adoptions))
        try:
            request = self._inputs.process_inputs(name, prompt, parameters, _TASKS, lora_request=self._lora_request)
        except ValueError as error:
            if not completion.request.json_schema:
                raise
            said = f"expected a JSON schema that vLLM can enforce, got: {one_line(error)}"
            raise PromptRefused("a JSON schema", said) from error
        self._call(self._core.add_request_async(request))
        self._running[name] = completion
        self._ids[completion] = name

    def _structure(self, request: GenerationRequest) -> Any:
        """The parameters by which vLLM enforces a request's JSON schema; None without one.

        Raises:
            PromptRefused: this engine was started without the tokenizer that schemas need.
            EngineError: the request has a prefix, and vLLM cannot continue within a JSON value.
        """
        if not request.json_schema:
            return None
        if not self._keeps_to_schemas:
            said = "expected no JSON schema, since this worker was started without slots for requests, got one"
            raise PromptRefused("a JSON schema", said)
        if request.prefix_token_ids:
            raise EngineError("a completion with a JSON schema that another worker started")
        return self._vllm.sampling_params.StructuredOutputsParams(json=request.json_schema)

    def _temperature(self, wanted: SamplingParams) -> float:
        """The temperature by which vLLM still has to divide the logits; 0 takes the likeliest token.

        Raises:
            EngineError: the request's log-probabilities would differ from the trainer's.
        """
        if self._fixed_temperature is None and wanted.truncates:
            raise EngineError(
                "a request with top_p, top_k or min_p, though this worker was started without them; restart it"
            )
        if self._fixed_temperature is None or wanted.temperature == 0.0:
            return wanted.temperature
        if wanted.temperature != self._fixed_temperature:
            raise EngineError(
                f"a request at temperature {wanted.temperature}, though this worker was started for truncated sampling "
                f"at temperature {self._fixed_temperature}; restart it"
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
        """See ``Decoder``. If a sender sends the weights, waits for its turn and reads nothing."""
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
                f"expected an adapter of rank {self._lora_rank} at most, for which this worker was started, got rank "
                f"{adapter.rank}; set training.lora.rank for the workers, too"
            )
        return adapter

    def pause(self) -> Iterable[ActiveCompletion]:
        """See ``Decoder``. The core finishes its scheduled steps, and schedules no others until weights are adopted."""
        recomputes = self._settings.adopt == "recompute"
        self._call(self._core.pause_scheduler_async(mode="keep", clear_cache=recomputes))
        # Each core answers after its last outputs, on the same connection. Outputs are processed one by one, since each
        # may complete a stop string.
        while not self._core.outputs_queue.empty():
            yield from self.step()

    def adopt(self, weights: "Path | PublishedAdapter | SendingTurn") -> None:
        """See ``Decoder``. Every rank of a tensor-parallel engine reads its own part of the files."""
        if isinstance(weights, PublishedAdapter):
            self._adopt_adapter(weights)
        elif isinstance(weights, SendingTurn):
            self._receive(weights)
        else:
            arguments = {"weights_path": str(weights.resolve())}
            self._call(self._core.collective_rpc_async("reload_weights", kwargs=arguments))
        self._adoptions += 1
        self._call(self._core.set_weight_version_async(str(self._adoptions)))
        # Completions without a token are queued again, in their order. Otherwise they would continue from cached keys
        # and values of the old weights, or put new ones into the cache under the old salt.
        unstarted = [completion for completion in self._ids if not completion.has_sampled]
        for completion in unstarted:
            self.drop(completion)
        for completion in unstarted:
            self.queue(completion)
        self._call(self._core.resume_scheduler_async())

    def _receive(self, turn: SendingTurn) -> None:
        """Make every rank receive the weights that the sender is sending."""

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
                raise EngineError(f"expected {wrong[0]} with the sender's checksum, got another in rank {rank}")

    def _adopt_adapter(self, adapter: PublishedAdapter) -> None:
        """Replace the previous adapter, also for running requests: all adapters share a name and a number."""
        from vllm.lora.request import LoRARequest

        path = str(adapter.directory.resolve())
        # ``load_inplace`` only here: a request with it would load the adapter again at every step.
        if not self._call(self._core.add_lora_async(LoRARequest(_LORA, 1, path, load_inplace=True))):
            raise EngineError(f"expected vLLM to load the adapter in {path}, but it did not; see this worker's log")
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
                # The event loop has to run again to close the client's sockets and tasks.
                loop.run_until_complete(asyncio.sleep(0))
                loop.close()
            if core is not None:
                core.resources.ctx.destroy(linger=0)

    def step(self) -> Iterable[ActiveCompletion]:
        """See ``Decoder``. With several cores, this is a step of one of them."""
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
                    raise EngineError(f"tokens of weights {self._adoptions}, got tokens of {outputs.weight_version}")
                # One row per token; the first column is the sampled token's.
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
            "enable_batch_sharded_sampling": False,  # it would bypass the model's compute_logits, see divide_logits
            "enforce_eager": on_cpu if settings.enforce_eager is None else settings.enforce_eager,
            "logprobs_mode": "processed_logprobs" if self._fixed_temperature is None else "raw_logprobs",
            "generation_config": "vllm",
            "enable_prefix_caching": True,
            "async_scheduling": not on_cpu,
            "skip_tokenizer_init": not self._keeps_to_schemas,
            # Named explicitly: by default vLLM uses the backend of its first request for all requests.
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
        stored = getattr(self._facts.config.get_text_config(), "dtype", None)  # vLLM's own "auto" narrows float32
        wanted = self._settings.dtype
        return wanted if wanted != "auto" or stored is None else str(stored).removeprefix("torch.")

    def _cpu_cache(self) -> int:
        """Bytes of a cache for at least one completion of full length (keys and values of all layers)."""
        text = self._facts.config.get_text_config()
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        # Keys and values (2), at most 4 bytes a number; two more blocks for the ends of prompt and completion.
        per_token: int = 2 * 4 * text.num_hidden_layers * heads * size
        return max(_DEFAULT_CPU_CACHE, per_token * (self._facts.max_length + 2 * _BLOCK))


def set_vllm_environment(threads: int = 1) -> None:
    """Set vLLM's environment variables for this process, permanently. Call it before an engine starts its thread.

    A user's own values for vLLM's log are kept. Other values would break the engine and are overridden.
    """
    on_cpu = _is_built_for_cpus()
    os.environ.update(_ENVIRONMENT | (_ENVIRONMENT_OF_A_CPU if on_cpu else {}))
    # Without a number of threads, vLLM on a GPU sets one here and in torch while a process starts, and resets it later.
    for name, value in (_UNLESS_SET if on_cpu else _UNLESS_SET | {"OMP_NUM_THREADS": str(threads)}).items():
        os.environ.setdefault(name, value)
    if _SOCKETS not in os.environ:
        # vLLM creates its sockets there and never removes them.
        os.environ[_SOCKETS] = directory = tempfile.mkdtemp(prefix="streamrl-vllm-")
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
    # vLLM's own modules use other libraries' deprecated interfaces, about which users can do nothing. Filters belong to
    # the process, so a thread must not restore them.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")


def process_environment(threads: int) -> dict[str, str]:
    """Additional environment variables of an engine's processes. ``threads``: CPU threads of a rank."""
    # Keeps torch's compiled code for the next engine: by default it is in the temporary directory, which is removed.
    compiled = os.environ.get(_COMPILED, os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}"))
    own = {"OMP_NUM_THREADS": str(threads), _COMPILED: compiled}
    return _IN_PROCESSES | (_IN_PROCESSES_OF_A_CPU if _is_built_for_cpus() else {}) | own


def _is_built_for_cpus() -> bool:
    """Whether the installed vLLM is the build for CPUs, by its package's name or version, as vLLM itself decides.

    Asking torch for a device would initialise CUDA's driver in this process, and a forked process would have none.
    Importing vLLM would read its environment too early.
    """
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return True  # vllm-cpu
