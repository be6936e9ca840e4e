"""``[generation]``: which engine a worker runs, and how. Imports no engine's library."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr

from streamrl.schemas.settings import Section


class GenerationSettings(Section):
    """``[generation]``: the engine of every worker. Names are vLLM's where vLLM has one."""

    engine: Annotated[
        Literal["transformers", "vllm", "emulated"],
        Field(
            description="The engine that samples: transformers (built in), vllm (in an environment of its own), or "
            "emulated, which runs no model but takes the times of [emulation]."
        ),
    ] = "transformers"
    max_num_seqs: Annotated[
        int, Field(ge=1, le=4096, description="Completions that one worker samples at once; 256 suit one GPU.")
    ] = 64
    max_model_len: Annotated[
        int | None, Field(ge=2, description="Most tokens of prompt and completion; by default what the model allows.")
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Field(description="Precision of weights and key-value cache; auto: the checkpoint's."),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Field(description="Device; auto: a CUDA device if there is one.")
    ] = "auto"
    threads: Annotated[int, Field(ge=1, le=256, description="CPU threads of one worker's engine.")] = 1
    max_num_batched_tokens: Annotated[
        int, Field(ge=64, description="Most prompt tokens, padding included, in one forward pass.")
    ] = 8192
    kv_cache_memory_bytes: Annotated[
        int | None,
        Field(ge=1 << 20, description="vLLM: size of the key-value cache; by default 256 MiB or more on a CPU."),
    ] = None
    gpu_memory_utilization: Annotated[
        float, Field(gt=0, le=1, description="vLLM on a GPU: share of its memory to use.")
    ] = 0.9
    tensor_parallel_size: Annotated[
        int, Field(ge=1, description="vLLM: devices over which one model is spread; each has its own threads.")
    ] = 1
    data_parallel_size: Annotated[
        int,
        Field(
            ge=1,
            description="vLLM: copies of the model in one worker, each on tensor_parallel_size devices of its own; "
            "they share max_num_seqs.",
        ),
    ] = 1
    enforce_eager: Annotated[
        bool | None, Field(description="vLLM: no graph compilation; by default on for a CPU, off for a GPU.")
    ] = None
    adopt: Annotated[
        Literal["in_flight", "recompute", "idle"],
        Field(
            description="When a worker adopts new weights, and what happens to the key-value cache. in_flight: between "
            "two decode steps; running completions keep their cache. recompute: the same, but the cache is recomputed "
            "with the new weights. idle: when no completion is running; until then it gets no new orders, and each "
            "completion has one version."
        ),
    ] = "in_flight"
    partial_trajectories: Annotated[
        Literal["off", "stream", "durable"],
        Field(
            description="Tokens of unfinished trajectories. off: not published. stream: published on the tokens topic "
            "as they are sampled, at most once, for displays. durable: written to partial-trajectories, so that "
            "another worker can continue after one was lost, drained or stopped, even if everything restarts."
        ),
    ] = "off"
    request_host: Annotated[
        str,
        Field(
            description="Address on which a worker listens for gateways. 0.0.0.0: listen on all addresses, and "
            "announce the one that the machine's own name resolves to."
        ),
    ] = "127.0.0.1"
    request_secret: Annotated[
        SecretStr | None,
        Field(
            description="Secret that gateways and workers share; unset: created once in the run's directory. Set it if "
            "they run on several machines."
        ),
    ] = None
    weights_cache: Annotated[
        Path | None,
        Field(
            description="Directory in which the workers of a host keep fetched weights, each version once. Unset: next "
            "to relay.store, else in the run's directory, one for each host name. Containers share it if it is a "
            "volume of theirs. If it is on the file system of the host's relay, files are linked rather than copied."
        ),
    ] = None

    @property
    def devices_per_worker(self) -> int:
        """CUDA devices that one worker uses, if it uses any."""
        return self.tensor_parallel_size * self.data_parallel_size
