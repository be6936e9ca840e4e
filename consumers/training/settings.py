"""The trainer's settings: optimizer, schedule, device, checkpoints and weight export."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from streamrl.consumers.batching.settings import Packing
from streamrl.schemas.secrets import without_credentials
from streamrl.schemas.settings import Section


class LoraSettings(Section):
    """``[training.lora]``: train only a low-rank adapter of linear layers, and publish only the adapter."""

    rank: Annotated[int, Field(ge=0, le=512, description="Rank of the adapters; 0: all weights are trained.")] = 0
    alpha: Annotated[
        float | None, Field(gt=0, description="Adapters are scaled by alpha / rank; unset: alpha is twice the rank.")
    ] = None
    target_modules: Annotated[
        tuple[str, ...],
        Field(description="Names of linear layers, such as q_proj; empty: all of them except the output layer."),
    ] = ()

    @property
    def scaled_alpha(self) -> float:
        """Alpha, or its default if it is unset."""
        return 2.0 * self.rank if self.alpha is None else self.alpha


class TrainingSettings(Section):
    """``[training]``: names follow Hugging Face's trainer where it has one."""

    backend: Annotated[
        Literal["torch", "emulated"],
        Field(
            description='"torch" trains a model; "emulated" trains nothing and takes the times of [emulation.training].'
        ),
    ] = "torch"
    learning_rate: Annotated[float, Field(gt=0, description="Peak learning rate of AdamW.")] = 1e-6
    weight_decay: Annotated[float, Field(ge=0, description="Decoupled decay of weight matrices.")] = 0.0
    adam_beta1: Annotated[
        float, Field(ge=0, lt=1, description="AdamW's first beta: how slowly its mean of gradients changes.")
    ] = 0.9
    adam_beta2: Annotated[
        float, Field(ge=0, lt=1, description="AdamW's second beta: how slowly its mean of squared gradients changes.")
    ] = 0.999
    max_grad_norm: Annotated[float, Field(gt=0, description="Gradients are scaled down to this norm.")] = 1.0
    warmup_steps: Annotated[int, Field(ge=0, description="Steps of linear warm-up from 0.")] = 0
    lr_schedule: Annotated[
        Literal["constant", "linear", "cosine"],
        Field(description="Learning rate after the warm-up; linear and cosine end at 0."),
    ] = "constant"
    max_steps: Annotated[int, Field(ge=1, description="Optimizer steps in the run.")] = 1000
    checkpoint_every: Annotated[int, Field(ge=1, description="Optimizer steps between checkpoints.")] = 50
    keep_checkpoints: Annotated[
        int, Field(ge=2, description="Newest checkpoints kept; at least two, so that one is a fallback.")
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
            description="What a worker fetches of a version: all weights, or a lossless difference to the version that "
            'it has, a few percent of them in bfloat16; "delta" costs the trainer\'s machine a comparison.'
        ),
    ] = "full"
    compute_zero_advantage: Annotated[
        bool,
        Field(
            description="Also compute samples whose advantage, and so gradient, is 0: slower, but comparable with "
            "trainers that do so, and ratio metrics cover all tokens."
        ),
    ] = False
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        Field(description="Type of activations and of exported weights; the trainer's own weights are float32."),
    ] = "float32"
    cast_lm_head_to_fp32: Annotated[
        bool,
        Field(
            description='With dtype "bfloat16", compute logits from float32 states and weights: ratios and KL have no '
            "rounding of logits, and the output layer takes longer."
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
            description="Processes on this machine, one for each device, that share the model, its optimizer and every "
            "micro-batch; batching.token_budget applies to each.",
        ),
    ] = 1
    packing: Annotated[
        Packing,
        Field(
            description='How a micro-batch is computed: "padded" pads rows to the longest; "varlen" joins documents '
            "without padding, each with its own positions and attention, and batching.token_budget counts no padding; "
            '"shared" does the same and computes a prefix that documents share, such as the prompt of a group, once. '
            'The last two need a model whose tokens see each other only through attention, "shared" one without '
            'sliding windows. On a CPU, `streamrl run` takes "shared" for Llama, Mistral, Qwen2 and Qwen3.',
        ),
    ] = "padded"
    attn_implementation: Annotated[
        Literal["sdpa", "flash_attention_2"],
        Field(
            description="torch's attention, called once for each packed document; or the package flash-attn, called "
            'once for all of them, on CUDA and with dtype "bfloat16".'
        ),
    ] = "sdpa"
    optimizer_offload: Annotated[
        bool,
        Field(
            description="Keep AdamW's moments and a copy of the weights in the processor's memory, and take the step "
            "there: saves 8 bytes for each parameter on the device, costs two copies over the bus and a slower step."
        ),
    ] = False
    gradient_checkpointing: Annotated[bool, Field(description="Recompute activations instead of keeping them.")] = False
    lora: LoraSettings = LoraSettings()
