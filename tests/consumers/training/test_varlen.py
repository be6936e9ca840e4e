"""Documents one behind the other are computed as each by itself: log-probs, gradients, steps, replays, refusals."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers.modeling_flash_attention_utils as flash
from torch import Tensor
from transformers import (
    BloomConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    JambaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
)
from transformers.models.bloom import BloomForCausalLM
from transformers.models.jamba import JambaForCausalLM
from transformers.models.mamba import MambaForCausalLM

from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.batching.micro_batches import MicroBatch
from streamrl.consumers.training.companions import open_companions
from streamrl.consumers.training.model import load_model, open_policy, open_scorer
from streamrl.consumers.training.settings import LoraSettings, TrainingSettings
from streamrl.consumers.training.step import PolicyLearner
from streamrl.schemas.errors import ModelError
from tests.consumers.training.factories import SMALL, VOCABULARY, make_micro_batch, save_tiny_model, tiny_config
from tests.consumers.training.test_step import gradient_of

CPU = torch.device("cpu")
PACKED = TrainingSettings(packing="varlen")
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=False)),
    "qwen2": lambda: Qwen2ForCausalLM(tiny_config()),
    # Learnt positions, and no groups of heads.
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    # A window that is shorter than the documents.
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4)),
    # Some layers with a window and some without.
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SMALL, head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"], pad_token_id=0
        )
    ),
}
LEARNERS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "a reference": {"beta": 0.1},
    "a critic of its own": {"name": "ppo", "critic": {"trunk": "own"}, "num_mini_batches": 2},
    "a critic on the policy's states": {"name": "ppo", "critic": {"trunk": "policy"}},
    "pairs": {"name": "dpo"},
}


def saved(directory: Path, name: str, seed: int = 0) -> Path:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = MODELS[name]()
    for parameter in model.parameters():  # as far from uniform as a trained model: a leak shows
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    model.save_pretrained(directory)
    return directory


def scored(model: Any, batch: MicroBatch, packing: Any) -> tuple[Tensor, Tensor]:
    inputs = (torch.tensor(array) for array in (batch.input_ids, batch.loss_mask, batch.temperatures))
    found: tuple[Tensor, Tensor] = open_scorer(model, TrainingSettings(packing=packing))(*inputs)
    return found


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def row_widths(model: Any) -> list[int]:
    """The lengths of the rows that the model computes from now on."""
    widths: list[int] = []
    model.get_decoder().register_forward_pre_hook(
        lambda _, __, inputs: widths.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    return widths


def expect_no_gradient_without_a_mask(scorer: Any, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    """Nothing to train gives zeros, which still have a way back. ``inputs``: token ids, mask, temperatures."""
    nothing, entropy = scorer(inputs[0], torch.zeros_like(inputs[1]), inputs[2])
    assert not nothing.any()
    assert entropy == 0
    assert nothing.requires_grad  # so that all ranks take the same way back


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_packed_log_probs_and_gradients_equal_padded_ones(tmp_path: Path, name: str, checkpointed: bool) -> None:
    path, batch, found = saved(tmp_path, name), make_micro_batch(6, temperature=0.7), []
    for packing in ("padded", "varlen"):
        model = load_model(path, CPU, gradient_checkpointing=checkpointed)
        logprobs, entropy = scored(model, batch, packing)
        (logprobs * torch.tensor(batch.advantages).unsqueeze(1)).sum().backward()
        found.append((logprobs.detach(), entropy, gradients(model)))
    (padded, padded_entropy, padded_gradients), (packed, packed_entropy, packed_gradients) = found
    assert (packed - padded).abs().max() <= 1e-5
    torch.testing.assert_close(packed_entropy, padded_entropy, rtol=1e-5, atol=0.0)
    assert packed_gradients.keys() == padded_gradients.keys()
    for key, gradient in padded_gradients.items():
        assert (packed_gradients[key] - gradient).norm() <= 1e-5 * gradient.norm().clamp(min=1e-3), key


@pytest.mark.parametrize("name", MODELS)
def test_a_document_is_independent_of_its_neighbours(tmp_path: Path, name: str) -> None:
    """Other tokens in its neighbours change no bit of its log-probs, nor of their gradient."""
    path, batch, found = saved(tmp_path, name), make_micro_batch(3), []
    others = batch.input_ids.copy()
    others[[0, 2]] = (others[[0, 2]] + 5) % VOCABULARY
    for ids in (batch.input_ids, others):
        model = load_model(path, CPU)
        logprobs, _ = scored(model, replace(batch, input_ids=ids), "varlen")
        logprobs[1].sum().backward()
        # Of the layers: an embedding is added to where its token stands.
        layers = {key: each for key, each in gradients(model).items() if "layers." in key or ".h." in key}
        found.append((logprobs.detach(), layers))
    (one, one_gradients), (other, other_gradients) = found
    assert not torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
    assert one_gradients
    assert all(torch.equal(one_gradients[key], other_gradients[key]) for key in one_gradients)


def opened(path: Path, algorithm: AlgorithmSettings, **options: Any) -> PolicyLearner:
    training = TrainingSettings(learning_rate=1e-2, device="cpu", **options)
    model = load_model(path, CPU)
    return PolicyLearner(model, open_companions(model, str(path), algorithm, training), algorithm, training, 9)


@pytest.mark.parametrize("name", LEARNERS)
def test_packed_and_padded_batches_compute_the_same(model_path: Path, name: str) -> None:
    algorithm, found = AlgorithmSettings.model_validate(LEARNERS[name]), []
    for packing in ("padded", "varlen"):
        learner = opened(model_path, algorithm, packing=packing)
        for seed in (1, 2):
            learner.accumulate(make_micro_batch(4, seed, advantages=[1.0, -1.0, 0.5, -0.5]))
        outcome = learner.finish_step(1.0)
        assert outcome.applied, outcome.problem
        moments = {key: each for key, each in learner.optimizer_tensors().items() if key.endswith(".exp_avg")}
        found.append((outcome.metrics, moments))
    (padded, padded_moments), (packed, packed_moments) = found
    assert packed == pytest.approx(padded, rel=1e-4, abs=1e-6)
    for key, moment in padded_moments.items():
        assert (packed_moments[key] - moment).norm() <= 1e-3 * moment.norm() + 1e-8, key


def test_rows_without_a_trained_token_cost_nothing_and_change_nothing(model_path: Path) -> None:
    batch = make_micro_batch(4)
    masked = batch.loss_mask.copy()
    masked[[1, 3]] = 0.0
    scorer = open_scorer(model := load_model(model_path, CPU), PACKED)
    widths = row_widths(model)
    inputs = torch.tensor(batch.input_ids), torch.tensor(masked), torch.tensor(batch.temperatures)
    found, _ = scorer(*inputs)
    # Up to the token before the last trained one, by which that is predicted.
    assert widths == [int(batch.lengths[[0, 2]].sum()) - 2]
    expected, _ = open_scorer(load_model(model_path, CPU), TrainingSettings())(*inputs)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5)
    expect_no_gradient_without_a_mask(scorer, inputs)


def test_an_adapter_and_its_base_are_packed_alike(tmp_path: Path) -> None:
    """The reference of a policy with adapters is the policy itself, with them off."""
    path, found = save_tiny_model(tmp_path), []
    for packing in ("padded", "varlen"):
        training = TrainingSettings(learning_rate=1e-2, device="cpu", lora=LoraSettings(rank=4), packing=packing)
        torch.manual_seed(1)
        model, algorithm = open_policy(str(path), None, CPU, training), AlgorithmSettings(beta=0.1)
        learner = PolicyLearner(model, open_companions(model, str(path), algorithm, training), algorithm, training, 9)
        metrics = []
        for seed in (1, 2):
            learner.accumulate(make_micro_batch(5, seed))
            metrics.append(learner.finish_step(1.0).metrics)
        found.append(metrics)
    assert found[1][1]["kl"] > 0
    for padded, packed in zip(*found, strict=True):
        assert packed == pytest.approx(padded, rel=1e-3, abs=1e-6)


def test_bfloat16_packs_too(model_path: Path) -> None:
    losses = []
    for packing in ("padded", "varlen"):
        learner = opened(model_path, AlgorithmSettings(), packing=packing, dtype="bfloat16")
        losses.append(gradient_of(learner, [make_micro_batch(5)])[0])
    assert losses[1] == pytest.approx(losses[0], rel=2e-2, abs=2e-3)


REFUSED: dict[str, tuple[Any, str]] = {
    "no positions": (lambda: BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_head=2)), "Bloom"),
    "recurrent": (
        lambda: MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1)),
        "Mamba",
    ),
    "capped attention": (
        lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, pad_token_id=0, attn_implementation="eager")),
        "Gemma2",
    ),
    "partly recurrent": (
        lambda: JambaForCausalLM(
            JambaConfig(
                **SMALL,
                attn_layer_period=2,
                attn_layer_offset=1,
                num_experts=1,
                use_mamba_kernels=False,
                mamba_dt_rank=4,
            )
        ),
        "Jamba",
    ),
}


@pytest.mark.parametrize("packing", ["varlen", "shared"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_keep_documents_apart_is_refused_in_one_line(name: str, packing: str) -> None:
    make, class_name = REFUSED[name]
    torch.manual_seed(0)
    refusal = rf'training\.packing="{packing}", got {class_name}.*set it to "padded"'
    with pytest.raises(ModelError, match=refusal) as told:
        open_scorer(make(), TrainingSettings.model_validate({"packing": packing}))
    assert "\n" not in str(told.value)


def test_a_model_that_looks_at_its_neighbours_is_found_out(model_path: Path) -> None:
    model = load_model(model_path, CPU)
    decoder = model.get_decoder()
    plain = decoder.forward

    def forward(input_ids: Any = None, position_ids: Any = None, **options: Any) -> Any:
        options.pop("document_lengths", None)  # as a model that does not hand down what it does not know
        return plain(input_ids=input_ids, position_ids=position_ids, **options)

    decoder.forward = forward
    with pytest.raises(ModelError, match="states that depend on a document's neighbours"):
        open_scorer(model, PACKED)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_flash_attention_gets_the_bounds_of_the_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """By transformers' own code, down to a kernel that computes plainly what flash-attn's would."""
    calls: list[tuple[list[int], int]] = []

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        assert causal
        assert (cu_seqlens_q.dtype, max_seqlen_q) == (torch.int32, max_seqlen_k)
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        calls.append((cu_seqlens_q.tolist(), max_seqlen_q))
        whole = torch.arange(len(query))
        document = torch.bucketize(whole, cu_seqlens_q[1:], right=True)
        distance = whole[:, None] - whole
        seen = (document[:, None] == document) & (distance >= 0)
        if window_size[0] >= 0:
            seen &= distance <= window_size[0]
        heads = query.shape[1] // key.shape[1]
        keys, values = (each.repeat_interleave(heads, dim=1).transpose(0, 1) for each in (key, value))
        scores = query.transpose(0, 1) @ keys.transpose(1, 2) * softmax_scale  # [heads, T, T]
        return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values).transpose(0, 1)

    package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
    for each, names in ((package, ("func", "varlen_func", "with_kvcache")), (padding, ())):
        for part in names:
            setattr(each, f"flash_attn_{part}", kernel)
        monkeypatch.setitem(sys.modules, each.__name__, each)
    padding.pad_input = padding.unpad_input = None  # type: ignore[attr-defined]
    monkeypatch.setattr(flash, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True)
    path, batch = saved(tmp_path, name), make_micro_batch(4)
    model = load_model(path, CPU)
    inputs = [torch.tensor(array) for array in (batch.input_ids, batch.loss_mask, batch.temperatures)]
    training = PACKED.model_copy(update={"attn_implementation": "flash_attention_2"})
    found, _ = open_scorer(model, training)(*inputs)
    ends = [0, *(batch.lengths - 1).cumsum().tolist()]
    assert calls == [(ends, int(batch.lengths.max()) - 1)] * 2  # a layer each
    assert model.config._attn_implementation == "flash_attention_2"
    open_scorer(model, training)  # its probes are no work for flash attention
    assert len(calls) == 2
    expected, _ = scored(load_model(path, CPU), batch, "padded")
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5)


def test_flash_attention_that_is_not_there_is_refused_in_one_line(model_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r'expected flash_attention_2 for Qwen2ForCausalLM.*attn_implementation = "sdpa"'
    ) as told:
        open_scorer(load_model(model_path, CPU), TrainingSettings(attn_implementation="flash_attention_2"))
    assert "\n" not in str(told.value)
