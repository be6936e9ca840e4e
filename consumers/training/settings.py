"""The trainer's settings: optimizer, schedule, device, checkpoints and weight export."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from streamrl.consumers.batching.settings import Packing
from streamrl.schemas.secrets import without_credentials
from streamrl.schemas.settings import Section


class LoraSettings(Section):
    """``[training.lora]``: train a low-rank adapter of linear layers, and nothing else; published by itself."""

    rank: Annotated[int, Field(ge=0, le=512, description="Of the adapters; 0: all weights are trained.")] = 0
    alpha: Annotated[
        float | None, Field(gt=0, description="Adapters count alpha / rank times; unset: alpha is twice the rank.")
    ] = None
    target_modules: Annotated[
        tuple[str, ...],
        Field(description="Names of linear layers, such as q_proj; none: all of them, but for the output layer."),
    ] = ()

    @property
    def scaled_alpha(self) -> float:
        """Alpha, also where it was left out."""
        return 2.0 * self.rank if self.alpha is None else self.alpha


class TrainingSettings(Section):
    """``[training]``: the names are those of Hugging Face's trainer where it has one."""

    backend: Annotated[
        Literal["torch", "emulated"],
        Field(description="What trains: a model in torch, or nothing: the times of [emulation.training]."),
    ] = "torch"
    learning_rate: Annotated[float, Field(gt=0, description="Peak learning rate of AdamW.")] = 1e-6
    weight_decay: Annotated[float, Field(ge=0, description="Decoupled decay of weight matrices.")] = 0.0
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    adam_epsilon: Annotated[float, Field(gt=0)] = 1e-8
    max_grad_norm: Annotated[float, Field(gt=0, description="Gradients are scaled down to this norm.")] = 1.0
    warmup_steps: Annotated[int, Field(ge=0, description="Steps of linear warm-up from nothing.")] = 0
    lr_schedule: Annotated[
        Literal["constant", "linear", "cosine"], Field(description="After the warm-up; the latter two end at 0.")
    ] = "constant"
    max_steps: Annotated[int, Field(ge=1, description="Optimizer steps in the run.")] = 1000
    checkpoint_every: Annotated[int, Field(ge=1, description="Optimizer steps between checkpoints.")] = 50
    on_checkpoint_failure: Annotated[
        Literal["stop", "continue"],
        Field(description="When a checkpoint cannot be written: end, or go on and try again at the next due step."),
    ] = "stop"
    keep_checkpoints: Annotated[
        int, Field(ge=2, description="Newest checkpoints kept; at least two, one to fall back on.")
    ] = 2
    checkpoint_location: Annotated[
        str | None,
        Field(description="Directory or s3://, gs://, az:// URL for checkpoints; unset: in the run's own directory."),
        AfterValidator(without_credentials),
    ] = None
    weight_sync_steps: Annotated[int, Field(ge=1, description="Optimizer steps between exported weights.")] = 1
    keep_weight_versions: Annotated[int, Field(ge=2, description="Newest weight versions kept for workers.")] = 4
    weight_transfer: Annotated[
        Literal["full", "delta"],
        Field(
            description="What a worker fetches of a version: all of its weights, or a lossless difference to those it "
            'has, which in bfloat16 is a few percent of them; "delta" costs the trainer\'s machine a comparison.'
        ),
    ] = "full"
    announce: Annotated[
        Literal["transaction", "plain"],
        Field(description="Step reports in Kafka transactions, which fence older trainers, or as single records."),
    ] = "transaction"
    tensor_digests: Annotated[bool, Field(description="Checksums of all weights in each step report.")] = True
    compute_zero_advantage: Annotated[
        bool,
        Field(
            description="Compute samples of advantage 0 as well, whose gradient is 0: slower, for a comparison with "
            "trainers that do, or for ratio metrics over all tokens."
        ),
    ] = False
    max_grad_norm_ratio: Annotated[
        float,
        Field(ge=0, description="A gradient norm above this many times the recent median is not applied; 0: it is."),
    ] = 100.0
    max_skipped_steps: Annotated[
        int, Field(ge=1, description="Gradients in a row that may be unfit to be applied before the trainer ends.")
    ] = 20
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        Field(description="Type of activations and of exported weights; the trainer's own weights are float32."),
    ] = "float32"
    cast_lm_head_to_fp32: Annotated[
        bool,
        Field(
            description='Logits from float32 states and weights where dtype is "bfloat16": their rounding is gone from '
            "ratios and KL, and the output layer takes longer."
        ),
    ] = False
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Field(description="auto: CUDA if there is a device, else the CPU.")
    ] = "auto"
    threads: Annotated[int, Field(ge=0, description="CPU threads of one operation; 0: torch decides.")] = 0
    ranks: Annotated[
        int,
        Field(
            ge=1,
            le=64,
            description="Processes on this machine, one a device, that share the model, its optimizer and every "
            "micro-batch; batching.token_budget is each one's.",
        ),
    ] = 1
    packing: Annotated[
        Packing,
        Field(
            description="How a micro-batch is computed: rows padded to the longest, or the documents one behind the "
            "other without padding, each with positions and attention of its own; batching.token_budget then counts "
            "no padding. Needs a model whose only look at other tokens is attention."
        ),
    ] = "padded"
    attn_implementation: Annotated[
        Literal["sdpa", "flash_attention_2"],
        Field(
            description="torch's attention, called once a document where they are packed; or the package flash-attn, "
            'once for all of them: on CUDA, with dtype "bfloat16".'
        ),
    ] = "sdpa"
    optimizer_offload: Annotated[
        bool,
        Field(
            description="Keep AdamW's moments and a copy of the weights in the processor's memory, and take the step "
            "there: 8 bytes a parameter less on the device, for two copies over the bus and a slower step."
        ),
    ] = False
    gradient_checkpointing: Annotated[bool, Field(description="Recompute activations instead of keeping them.")] = False
    lora: LoraSettings = LoraSettings()
