"""A low-rank adapter: trained alone, published alone, resumed and replayed to the bit, merged."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from streamrl.consumers.algorithms.losses import CompletionScorer
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.training.adapters import BASE, write_merged
from streamrl.consumers.training.checkpoints.storage import open_storage
from streamrl.consumers.training.checkpoints.store import CheckpointStore, VerifiedCheckpoint
from streamrl.consumers.training.model import load_model, load_reference, open_policy
from streamrl.consumers.training.policy import PolicyPaths, TrainedPolicy, digests_of
from streamrl.consumers.training.settings import LoraSettings, TrainingSettings
from streamrl.inspection.replay.scratch_policy import ScratchPolicy, StepConfig
from streamrl.producers.generation.engines.slots import SlotDecoder
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.schemas.errors import CheckpointError, ModelError, SettingsError, WeightsError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.weights import ADAPTER, MANIFEST, manifest_in
from streamrl.settings.loading import load_settings
from tests.consumers.training.checkpoints.damaged_storage import manifest_of
from tests.consumers.training.factories import make_micro_batch, save_tiny_model

CPU = torch.device("cpu")
LORA = LoraSettings(rank=4)
TRAINING = TrainingSettings(learning_rate=1e-2, threads=1, device="cpu", lora=LORA)
PLAIN = AlgorithmSettings()
KL = AlgorithmSettings(beta=0.1)


@dataclass
class Place:
    """A run's directory and its base model."""

    root: Path
    base: Path

    def policy(
        self,
        restored: VerifiedCheckpoint | None = None,
        algorithm: AlgorithmSettings = PLAIN,
        training: TrainingSettings = TRAINING,
    ) -> TrainedPolicy:
        paths = PolicyPaths(str(self.base), open_storage(self.root / "checkpoints", self.root), self.root / "weights")
        return TrainedPolicy(paths, algorithm, training, 8, restored, seed=3)

    def checkpoint(self, policy: TrainedPolicy) -> VerifiedCheckpoint:
        store = CheckpointStore(open_storage(self.root / "checkpoints", self.root), 2)
        lineage = store.claim_lineage(now=1.0)
        policy.checkpoint(manifest_of(lineage.number, policy.step), {}, b"", lineage)
        found = store.newest()
        assert found is not None
        return found


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, save_tiny_model(tmp_path / "base"))


def step(policy: TrainedPolicy, seed: int) -> None:
    policy.accumulate(make_micro_batch(6, seed))
    assert policy.finish_step(1.0).applied


def logits(model: object, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens).logits  # type: ignore[operator,no-any-return]


TOKENS = torch.arange(1, 11).unsqueeze(0)


def test_only_the_adapter_is_trained_and_it_begins_as_its_base(place: Place) -> None:
    policy = place.policy()
    model = policy.learner.model
    base = logits(load_model(place.base, CPU), TOKENS)
    assert torch.equal(logits(model, TOKENS), base)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for seed in range(3):
        step(policy, seed)
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {name for name in before if ".lora_" in name}
    assert len(changed) == 2 * 2 * 7  # A and B, of two layers, of seven projections
    assert not torch.allclose(logits(model, TOKENS), base, atol=1e-3)


def test_the_adapter_alone_is_published_and_a_worker_adds_it_to_the_base_that_it_has(place: Place) -> None:
    policy, decoder = place.policy(), SlotDecoder(str(place.base), GenerationSettings(dtype="float32", device="cpu"))
    decoder.load()
    for number in range(1, 4):
        step(policy, number)
        policy.snapshot().export(PolicyVersion(1, number), 1.0)
        directory = place.root / "weights" / f"1-{number}"
        assert sorted(path.name for path in directory.iterdir()) == [
            "adapter_config.json", ADAPTER, BASE, MANIFEST,
        ]  # fmt: skip
        decoder.adopt(decoder.read_weights(directory))
        sampled = logits(decoder._model._model, TOKENS)
        # Each time from the base, and not from what the adapter before made of it.
        assert torch.allclose(sampled, logits(policy.learner.model, TOKENS), atol=1e-5)
    whole = sum(path.stat().st_size for path in place.base.glob("*.safetensors"))
    manifest = manifest_in(directory)
    assert manifest is not None
    assert manifest.adapter is not None
    assert (manifest.adapter.rank, manifest.adapter.scale) == (4, 2.0)
    assert sum(file.size for file in manifest.files) < 1.5 * whole  # of a tiny model rank 4 is much


def test_an_adapter_belongs_to_its_base_and_a_worker_with_another_refuses_it(place: Place, tmp_path: Path) -> None:
    policy = place.policy()
    policy.snapshot().export(PolicyVersion(1, 0), 1.0)
    other = save_tiny_model(tmp_path / "other", num_hidden_layers=1)
    decoder = SlotDecoder(str(other), GenerationSettings(dtype="float32", device="cpu"))
    decoder.load()
    with pytest.raises(
        WeightsError, match=r"expected the base of the adapter \(sha256 .*set model.path to the trainer"
    ):
        decoder.read_weights(place.root / "weights" / "1-0")


def test_a_restart_resumes_to_the_bit_and_its_checkpoint_holds_the_adapter_alone(place: Place) -> None:
    policy = place.policy(algorithm=KL)
    for seed in range(2):
        step(policy, seed)
    restored = place.checkpoint(policy)
    assert not (restored.directory / "model.safetensors").exists()
    assert set(restored.state.optimizer) == {"recent_grad_norms"} | {
        f"{name}.{moment}"
        for name, parameter in policy.learner.model.named_parameters()
        if parameter.requires_grad
        for moment in ("step", "exp_avg", "exp_avg_sq")
    }
    again = place.policy(restored, KL)
    for one in (policy, again):
        step(one, 7)
    assert again.step == 3
    assert digests_of(again.snapshot().tensors) == digests_of(policy.snapshot().tensors)


def test_a_replay_takes_the_same_steps_to_the_bit_from_the_beginning_and_from_a_checkpoint(place: Place) -> None:
    policy, config = place.policy(algorithm=KL), StepConfig(KL, TRAINING, 8, str(place.base), seed=3)
    scratch = ScratchPolicy(config, str(place.base), 0, {})
    for seed in range(2):
        step(policy, seed)
        scratch.learner.accumulate(make_micro_batch(6, seed))
        scratch.learner.finish_step(1.0)
        assert digests_of(scratch.tensors()) == digests_of(policy.snapshot().tensors)
    restored = place.checkpoint(policy)
    scratch = ScratchPolicy(config, restored.directory, 2, restored.state.optimizer)
    step(policy, 5)
    scratch.learner.accumulate(make_micro_batch(6, 5))
    scratch.learner.finish_step(1.0)
    assert digests_of(scratch.tensors()) == digests_of(policy.snapshot().tensors)


def test_the_reference_of_the_kl_term_is_the_base_without_a_second_model(place: Place) -> None:
    policy = place.policy(algorithm=KL)
    for seed in range(2):
        step(policy, seed)
    learner = policy.learner
    batch = make_micro_batch(5, 9)
    inputs = torch.as_tensor(batch.input_ids), torch.as_tensor(batch.loss_mask), torch.as_tensor(batch.temperatures)
    with torch.no_grad():
        assert learner._reference is not None
        found = learner._reference(*inputs)[0]
        frozen = CompletionScorer(load_reference(place.base, CPU))(*inputs)[0]
        own = learner._scorer(*inputs)[0]
    assert torch.equal(found, frozen)
    assert not torch.allclose(own, frozen, atol=1e-3)
    # And what follows is trained as before.
    assert {p.requires_grad for n, p in learner.model.named_parameters() if ".lora_" in n} == {True}
    policy.accumulate(batch)
    assert policy.finish_step(1.0).metrics["kl"] > 0


def test_a_checkpoint_can_be_loaded_with_peft_and_merged_without(place: Place, tmp_path: Path) -> None:
    policy = place.policy()
    for seed in range(3):
        step(policy, seed)
    restored = place.checkpoint(policy)
    trained = logits(policy.learner.model, TOKENS)
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(restored.directory), TOKENS), trained, atol=1e-5)
    write_merged(load_model(place.base, CPU), restored.directory, tmp_path / "merged")
    assert set(load_file(tmp_path / "merged" / "model.safetensors")) == set(load_file(place.base / "model.safetensors"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(merged, TOKENS), trained, atol=1e-5)


def test_a_checkpoint_of_another_base_or_shape_or_kind_is_refused(place: Place, tmp_path: Path) -> None:
    policy = place.policy()
    step(policy, 0)
    directory = place.checkpoint(policy).directory
    wider = TRAINING.model_copy(update={"lora": LoraSettings(rank=8)})
    with pytest.raises(CheckpointError, match=r"of shape \(8, .*training.lora was changed: set it back"):
        open_policy(str(place.base), directory, CPU, wider)
    whole = TRAINING.model_copy(update={"lora": LoraSettings()})
    with pytest.raises(ModelError, match=r"got an adapter: set training.lora as before, or merge the adapter first"):
        open_policy(str(place.base), directory, CPU, whole)
    with pytest.raises(ModelError, match=r"got a whole model: the run trained all weights before"):
        open_policy(str(place.base), place.base, CPU, TRAINING)
    told = json.loads((directory / BASE).read_text())
    (directory / BASE).write_text(json.dumps(told | {"sha256": "0" * 64}))
    with pytest.raises(CheckpointError, match=r"sha256 000000000000.*set model.path to the model it was trained on"):
        open_policy(str(place.base), directory, CPU, TRAINING)
    with pytest.raises(ModelError, match=r"expected nonsense in Qwen2.*name linear layers of this model"):
        unknown = TRAINING.model_copy(update={"lora": LoraSettings(rank=4, target_modules=("nonsense",))})
        open_policy(str(place.base), None, CPU, unknown)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--training.weight_transfer=delta"], "a whole adapter is smaller"),
        (["--training.backend=emulated", "--generation.engine=emulated"], "which has no layers"),
        (["--generation.engine=emulated"], "no base model to add an adapter to"),
    ],
)
def test_settings_that_do_not_go_with_adapters_are_refused_in_one_line(arguments: list[str], said: str) -> None:
    base = ["--data.dataset=chain_sum", "--model.path=m", "--training.lora.rank=8"]
    assert load_settings(None, [*base, '--training.lora.target_modules=["q_proj", "v_proj"]']).training.lora.rank == 8
    with pytest.raises(SettingsError, match=said) as refused:
        load_settings(None, [*base, *arguments])
    assert "\n" not in str(refused.value)
    with pytest.raises(SettingsError, match=r"no training\.lora\.alpha with training\.lora\.rank = 0"):
        load_settings(None, ["--data.dataset=chain_sum", "--model.path=m", "--training.lora.alpha=8"])
