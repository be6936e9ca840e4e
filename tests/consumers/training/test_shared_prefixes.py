"""Documents that share prefixes are computed as each by itself: log-probs, gradients, memory, refusals."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from streamrl.consumers.algorithms.settings import PRESETS, AlgorithmSettings
from streamrl.consumers.batching.micro_batches import MicroBatch
from streamrl.consumers.batching.prefixes import prefix_tree
from streamrl.consumers.training import attention, prefix_attention
from streamrl.consumers.training.companions import open_companions
from streamrl.consumers.training.model import load_model, open_policy, open_scorer
from streamrl.consumers.training.prefix_attention import (
    attend_along_prefixes,
    attend_by_mask,
    is_finely_branched,
    why_not_on,
)
from streamrl.consumers.training.settings import LoraSettings, TrainingSettings
from streamrl.consumers.training.step import PolicyLearner
from streamrl.schemas.errors import ModelError
from streamrl.schemas.reports import RecordRef
from tests.consumers.training.factories import VOCABULARY
from tests.consumers.training.test_varlen import (
    CPU,
    MODELS,
    expect_no_gradient_without_a_mask,
    gradients,
    row_widths,
    saved,
    scored,
)

FLOAT32_BOUND = 1e-5
"""Relative difference of two gradients that are sums in another order."""
CAUSAL = ("llama", "qwen2", "gpt2")
LOSSES: dict[str, dict[str, Any]] = {name: {"name": name} for name in PRESETS} | {
    "a reference": {"beta": 0.1},
    "a critic on the policy's states": {"name": "ppo", "critic": {"trunk": "policy"}},
    "a proximal ratio": {"ratio": "proximal", "num_iterations": 2},
}


def rows_of(
    sequences: Sequence[tuple[str, list[int], list[int]]], seed: int, advantages: Sequence[float]
) -> MicroBatch:
    """A micro-batch of sequences: trajectory id, tokens, and the mask of those to train."""
    random = np.random.default_rng(seed)
    lengths = np.array([len(tokens) for _, tokens, _ in sequences], dtype=np.int64)
    ids = np.zeros((len(sequences), int(lengths.max())), dtype=np.int64)
    masks = np.zeros(ids.shape, dtype=np.float32)
    for row, (_, tokens, mask) in enumerate(sequences):
        ids[row, : len(tokens)], masks[row, : len(tokens)] = tokens, mask
    return MicroBatch(
        input_ids=ids,
        loss_mask=masks,
        behaviour_logprobs=-masks * random.uniform(2.5, 3.8, size=ids.shape).astype(np.float32),
        advantages=np.array(advantages, dtype=np.float32),
        lengths=lengths,
        temperatures=np.full(len(sequences), 0.8, dtype=np.float32),
        refs=tuple(RecordRef(name, 0, row) for row, (name, _, _) in enumerate(sequences)),
        versions=(1,) * len(sequences),
    )


def grouped(seed: int, *, groups: int = 2, size: int = 4, longest: int = 9) -> MicroBatch:
    """Random groups: prompts of one to ``longest`` tokens and completions of as many, of few different tokens."""
    random = np.random.default_rng(seed)
    sequences = []
    for number in range(groups):
        prompt = random.integers(1, VOCABULARY, size=random.integers(1, longest + 1)).tolist()
        for index in range(size):
            tokens = random.integers(1, 4, size=random.integers(1, longest + 1)).tolist()
            mask = [0] * len(prompt) + [1] * len(tokens)
            sequences.append((f"p/{seed}-{number}/0/{index}", prompt + tokens, mask))
    return rows_of(sequences, seed, [1.0, -1.0, 0.5, -0.5][:size] * groups)


def session_tree() -> MicroBatch:
    """Sessions of three turns: two leave the first after one turn, one after two; answers are not trained."""
    prompt, answer = list(range(1, 9)), [9, 10]
    first, second, other = [11, 12, 13], [14, 15], [11, 12, 16, 17]
    turns = [
        ([first, second, [18, 19]], 3),
        ([first, second, [20]], 3),
        ([first, [21, 22, 21]], 2),
        ([other], 1),
    ]
    sequences = []
    for index, (sampled, count) in enumerate(turns):
        tokens, mask = list(prompt), [0] * len(prompt)
        for number, turn in enumerate(sampled):
            more = answer if number < count - 1 else []
            tokens, mask = tokens + turn + more, mask + [1] * len(turn) + [0] * len(more)
        sequences.append((f"p/s/0/{index}", tokens, mask))
    return rows_of(sequences, 1, [1.0, -1.0, 0.5, -0.5])


def opened(path: Path, packing: str, algorithm: AlgorithmSettings, **options: Any) -> PolicyLearner:
    training = TrainingSettings.model_validate({"learning_rate": 1e-2, "device": "cpu", "packing": packing} | options)
    torch.manual_seed(1)
    model = open_policy(str(path), None, CPU, training)
    return PolicyLearner(model, open_companions(model, str(path), algorithm, training), algorithm, training, 9)


def first_gradient(learner: PolicyLearner, batches: Sequence[MicroBatch]) -> tuple[Tensor, dict[str, float]]:
    """The gradient of the step's first update, and the step's metrics."""
    for batch in batches:
        learner.accumulate(batch)
    found: list[Tensor] = []

    def observe() -> None:
        modules = [learner.model, *([] if learner.critic is None else [learner.critic])]
        grads = [each.grad for module in modules for each in module.parameters() if each.grad is not None]
        found.append(torch.cat([each.flatten().clone() for each in grads]))

    outcome = learner.finish_step(1.0, observe)
    assert outcome.applied, outcome.problem
    return found[0], outcome.metrics


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_the_gradient_of_separate_documents(tmp_path: Path, name: str, seed: int) -> None:
    path, chosen = saved(tmp_path, "qwen2"), LOSSES[name]
    if name == "distillation":
        chosen = chosen | {"teacher": {"path": str(saved(tmp_path / "teacher", "qwen2", seed=1))}}
    algorithm = AlgorithmSettings.model_validate(chosen)
    batches = [grouped(10 * seed), grouped(10 * seed + 1, groups=3)]
    (separate, metrics), (shared, others) = (
        first_gradient(opened(path, packing, algorithm), batches) for packing in ("padded", "shared")
    )
    assert float(separate.norm()) > 0
    assert distance(shared, separate) <= FLOAT32_BOUND
    assert others == pytest.approx(metrics, rel=1e-4, abs=1e-5)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointed": {"gradient_checkpointing": True},
    "adapters": {"lora": LoraSettings(rank=4)},
    "a float32 head": {"cast_lm_head_to_fp32": True},
}


@pytest.mark.parametrize("batch", [grouped(3), grouped(4, longest=20), session_tree()], ids=["short", "long", "tree"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # peft, of GPT-2
@pytest.mark.parametrize("model", CAUSAL)
def test_every_model_and_option_has_the_gradient_of_separate_documents(
    tmp_path: Path, model: str, options: dict[str, Any], batch: MicroBatch
) -> None:
    path, algorithm = saved(tmp_path, model), AlgorithmSettings(beta=0.1)
    separate, shared = (
        first_gradient(opened(path, packing, algorithm, **options), [batch])[0] for packing in ("padded", "shared")
    )
    assert distance(shared, separate) <= FLOAT32_BOUND


def test_bfloat16_is_no_farther_from_float32_than_separate_documents_are(tmp_path: Path) -> None:
    path, algorithm = saved(tmp_path, "llama"), AlgorithmSettings()
    off: dict[str, list[float]] = {"padded": [], "shared": []}
    for seed in range(20):
        batch = grouped(seed, longest=20)
        exact, _ = first_gradient(opened(path, "padded", algorithm), [batch])
        for packing, found in off.items():
            found.append(
                distance(first_gradient(opened(path, packing, algorithm, dtype="bfloat16"), [batch])[0], exact)
            )
    assert 0 < np.mean(off["shared"]) <= 1.05 * np.mean(off["padded"])


def test_a_token_of_a_prompt_is_computed_once_and_an_untrained_row_not_at_all(tmp_path: Path) -> None:
    batch = session_tree()
    masks = batch.loss_mask.copy()
    masks[3] = 0.0
    model = load_model(saved(tmp_path, "llama"), CPU)
    scorer, widths = open_scorer(model, TrainingSettings(packing="shared")), row_widths(model)
    inputs = torch.tensor(batch.input_ids), torch.tensor(masks), torch.tensor(batch.temperatures)
    found, _ = scorer(*inputs)
    # Prompt 8, first turn and answer 5, second and answer 4; of the ends 1, 0 and 2: a last token predicts nothing.
    assert widths == [8 + 5 + 4 + 1 + 2]
    expected, _ = scored(load_model(tmp_path, CPU), replace(batch, loss_mask=masks), "padded")
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5)
    expect_no_gradient_without_a_mask(scorer, inputs)


@pytest.mark.parametrize("scores", [0, 1 << 30], ids=["cascade", "separate rows"])
def test_the_order_of_rows_and_the_number_of_threads_do_not_decide_the_bits(
    tmp_path: Path, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_attention, "CALL_SCORES", scores)
    path, batch, found = saved(tmp_path, "llama"), grouped(5, longest=20), []
    for rows in (range(8), range(8), range(7, -1, -1)):
        torch.set_num_threads(2)
        try:
            model = load_model(path, CPU)
            logprobs, _ = scored(model, batch.take(rows), "shared")
            logprobs.sum().backward()
        finally:
            torch.set_num_threads(1)
        found.append((logprobs.detach()[list(rows).index(0)], gradients(model)))
    (first, own), *others = found
    assert all(torch.equal(each, first) for each, _ in others)
    assert all(torch.equal(own[name], again[name]) for name in own for again in (others[0][1],))


def kept_bytes(model: Any, batch: MicroBatch, packing: str) -> int:
    """Bytes that autograd keeps for the backward pass, weights and inputs included."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs, _ = scored(model, batch, packing)
    logprobs.sum().backward()
    return sum(sizes.values())


@pytest.mark.parametrize("longest", [4, 30])
def test_no_more_is_kept_for_the_backward_pass(tmp_path: Path, longest: int) -> None:
    path, batch = saved(tmp_path, "llama"), grouped(6, longest=longest)
    separate, shared = (kept_bytes(load_model(path, CPU), batch, packing) for packing in ("varlen", "shared"))
    assert shared < separate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
def test_separate_rows_and_a_cascade_attend_alike(
    seed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = session_tree() if seed == 3 else grouped(seed, longest=20)
    tree = prefix_tree(batch.input_ids, batch.lengths)
    torch.manual_seed(seed)
    query, key, value = inputs = [
        torch.randn(1, heads, len(tree.row), 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)
    ]
    weights, found = torch.randn(1, len(tree.row), 4, 8, dtype=dtype), []
    for scores in (0, 1 << 30):
        monkeypatch.setattr(prefix_attention, "CALL_SCORES", scores)
        assert is_finely_branched(tree) == bool(scores)
        out = attend_along_prefixes(query, key, value, tree, 0.3)
        found.append([out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)])
    bound = 1e-5 if dtype == torch.float32 else 3e-2
    for one, other in zip(*found, strict=True):
        assert distance(one, other) <= bound


def test_long_pieces_are_read_by_a_cascade_and_short_ones_in_separate_rows() -> None:
    short, long = grouped(0, groups=8, size=8), grouped(0, groups=1, size=2, longest=300)
    assert is_finely_branched(prefix_tree(short.input_ids, short.lengths))
    assert not is_finely_branched(prefix_tree(long.input_ids, long.lengths))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()  # flex attention has no gradient on a processor
def test_a_mask_of_blocks_sees_the_same() -> None:
    """What a GPU computes, here without its compiled kernel."""
    batch = grouped(7, longest=20)
    tree = prefix_tree(batch.input_ids, batch.lengths)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, len(tree.row), 8) for heads in (4, 2, 2))
    expected = attend_along_prefixes(query, key, value, tree, 0.3)
    found = attend_by_mask(query, key, value, tree, 0.3, flex_attention)
    torch.testing.assert_close(found.transpose(1, 2), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_sliding_windows_are_refused_in_one_line(name: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(ModelError, match=r'training\.packing="shared", got .* with .*sliding.*; set it to "padded"'):
        open_scorer(MODELS[name](), TrainingSettings(packing="shared"))


def test_flash_attention_of_the_package_is_refused(tmp_path: Path) -> None:
    model = load_model(saved(tmp_path, "llama"), CPU)
    training = TrainingSettings(packing="shared", attn_implementation="flash_attention_2")
    with pytest.raises(ModelError, match=r'training\.packing="shared", got .*flash_attention_2; set it to "varlen"'):
        open_scorer(model, training)


@pytest.mark.parametrize(
    ("device", "has_triton", "why"),
    [("cpu", False, ""), ("cuda", True, ""), ("cuda", False, "without Triton"), ("mps", True, "device mps")],
)
def test_a_device_that_cannot_compute_it_is_named(device: str, has_triton: bool, why: str) -> None:
    found = why_not_on(device, has_triton=lambda: has_triton)
    assert why in found
    assert bool(why) == bool(found)


def test_a_gpu_without_triton_is_refused_when_the_model_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(saved(tmp_path, "llama"), CPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention, "why_not_on", lambda device: why_not_on(device, has_triton=lambda: False))
    with pytest.raises(ModelError, match=r'without Triton.*set it to "varlen"'):
        open_scorer(model, TrainingSettings(packing="shared"))
    open_scorer(model, TrainingSettings(packing="shared", device="cpu"))
