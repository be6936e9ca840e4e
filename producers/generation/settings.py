"""``[generation]``: which engine a worker runs and how; knows nothing of any engine's library."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr

from streamrl.schemas.settings import Section


class GenerationSettings(Section):
    """``[generation]``: the engine of every worker. Names are vLLM's where vLLM has one."""

    engine: Annotated[
        Literal["transformers", "vllm", "emulated"],
        Field(
            description="What samples: transformers (built in), vLLM (its own environment), or nothing: the times of "
            "[emulation] in place of a model."
        ),
    ] = "transformers"
    max_num_seqs: Annotated[
        int, Field(ge=1, le=4096, description="Completions sampled at once by one worker; 256 suit one GPU.")
    ] = 64
    max_model_len: Annotated[
        int | None, Field(ge=2, description="Most tokens of prompt and completion; by default what the model allows.")
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Field(description="Precision of weights and key-value cache; auto is the checkpoint's."),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Field(description="auto takes a CUDA device when there is one.")
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
        int, Field(ge=1, description="vLLM: devices one model is spread over; each has threads of its own.")
    ] = 1
    data_parallel_size: Annotated[
        int,
        Field(
            ge=1,
            description="vLLM: copies of the model in one worker, each on so many devices of its own; they share "
            "max_num_seqs.",
        ),
    ] = 1
    enforce_eager: Annotated[
        bool | None, Field(description="vLLM: no graph compilation; by default on for a CPU, off for a GPU.")
    ] = None
    chunk_tokens: Annotated[
        int, Field(ge=1, description="Tokens an engine gathers per completion before the worker sees them.")
    ] = 32
    adopt: Annotated[
        Literal["in_flight", "recompute", "idle"],
        Field(
            description="When a worker takes new weights, and what becomes of the key-value cache: in_flight: between "
            "two decode steps, and what runs goes on with its cache; recompute: the same, but that cache is computed "
            "anew with the new weights; idle: once it runs nothing, so that a completion is of one version, and no new "
            "order comes before that."
        ),
    ] = "in_flight"
    partial_trajectories: Annotated[
        Literal["off", "stream", "durable"],
        Field(
            description="Tokens before their trajectory is finished: off: nobody sees them; stream: on the tokens "
            "topic as they are sampled, at most once, to be looked at; durable: on partial-trajectories, so that "
            "another worker goes on where one was lost, drained or stopped, also after a restart of everything."
        ),
    ] = "off"
    partial_chunk_tokens: Annotated[
        int, Field(ge=1, description="durable: tokens of a completion that are written at once.")
    ] = 256
    partial_chunk_s: Annotated[
        float, Field(gt=0, description="durable: seconds after which fewer are written, too.")
    ] = 2.0
    request_slots: Annotated[
        int | None,
        Field(
            ge=0,
            le=4096,
            description="Of max_num_seqs, the slots kept for requests of gateways, which orders leave alone; unset: a "
            "quarter with gateway.enabled, else none.",
        ),
    ] = None
    request_host: Annotated[
        str,
        Field(
            description="Address on which a worker takes requests of gateways; 0.0.0.0: on all, telling the one "
            "that its own name stands for."
        ),
    ] = "127.0.0.1"
    request_secret: Annotated[
        SecretStr | None,
        Field(
            description="Known to gateways and workers alone; unset: made once in the run's directory, which processes "
            "on other machines do not see."
        ),
    ] = None
    heartbeat_interval_s: Annotated[float, Field(gt=0, le=60, description="Seconds between heartbeats.")] = 1.0
    fencing_timeout_s: Annotated[
        float,
        Field(gt=0, description="After standing still for so long, a worker looks first whether another replaced it."),
    ] = 5.0
    drain_grace_s: Annotated[
        float,
        Field(ge=0, description="After SIGTERM: time for running completions; unfinished ones are done elsewhere."),
    ] = 10.0
    max_undelivered: Annotated[
        int, Field(ge=1, description="Finished completions the broker may owe us before nothing new is started.")
    ] = 256
    fetch_timeout_s: Annotated[float, Field(gt=0, description="Longest silence of a relay.")] = 30.0
    weights_cache: Annotated[
        Path | None,
        Field(
            description="Directory in which the workers of a host keep the weights they fetch, each version once; "
            "unset: beside relay.store, else in the run's directory, one for each host name. Containers share it if it "
            "is a volume of theirs. On the file system of the host's relay, files are linked and not copied."
        ),
    ] = None

    @property
    def devices_per_worker(self) -> int:
        """CUDA devices that one worker samples on, where it does so on any."""
        return self.tensor_parallel_size * self.data_parallel_size
