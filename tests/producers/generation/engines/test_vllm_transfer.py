"""vLLM takes weights from a sender while it samples; its tokens are of the weights that they are said to be of."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from streamrl.producers.generation.engines.factory import build_decoder
from streamrl.producers.generation.engines.threaded import ThreadedEngine
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.schemas.errors import EngineError, WeightsError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.weights import groups as weight_groups
from streamrl.weights.export import WeightExporter
from streamrl.weights.groups import NcclGroup, _NoControl
from streamrl.weights.turns import SENT, SendingTurn, SentVersion
from tests.producers.generation.engines.conftest import SLOTS, KeptDecoder, MakeVersion
from tests.producers.generation.engines.replay import PROMPTS, load, mixed_forward, sample, sample_and_adopt, worst

pytest.importorskip("streamrl.weights.sending", reason="the sender is an optional feature")

from streamrl.weights.sending.sender import WeightSender, listed
from tests.weights.sending.test_sender import sending

pytestmark = pytest.mark.vllm

BEGUN = PolicyVersion(1, 0)
LONG = pytest.mark.long


@pytest.mark.parametrize(
    "ranks",
    [
        {},
        pytest.param({"tensor_parallel_size": 2}, marks=LONG),
        pytest.param({"data_parallel_size": 2}, marks=LONG),
    ],
    ids=str,
)
async def test_sent_weights_are_adopted_in_flight_as_files_are(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    no_eos_dir: Path,
    no_eos_version: MakeVersion,
    ranks: dict[str, int],
) -> None:
    store = WeightExporter(tmp_path / "store", 8)
    directories = {BEGUN: no_eos_dir} | {PolicyVersion(1, number): no_eos_version(number) for number in (1, 2, 3)}
    if ranks:
        settings = GenerationSettings.model_validate({"engine": "vllm", "max_num_seqs": SLOTS, **ranks})
        decoder = build_decoder(settings, no_eos_dir, transfer="gloo")
    else:
        decoder = request.getfixturevalue("vllm_decoder").of(no_eos_dir)
    engine = ThreadedEngine(decoder, SLOTS, chunk_tokens=4)
    await engine.start()
    try:
        async with sending(store, 30.0) as address:
            await engine.adopt(no_eos_dir, BEGUN)
            sent = {
                version: to_be_sent(tmp_path, store, directory, version, address)
                for version, directory in directories.items()
                if version != BEGUN
            }
            others = [sample(engine, PROMPTS[n % 6], max_completion_length=300) for n in range(SLOTS - 1)]
            adopting = sample_and_adopt(engine, PROMPTS[3], sent, max_completion_length=400)
            results = await asyncio.gather(adopting, *others)
        # The sender is gone: the weights stay, and files are taken as before.
        with pytest.raises(WeightsError, match="to send weights"):
            await engine.adopt(sent[PolicyVersion(1, 3)], PolicyVersion(1, 4))
        kept = await sample(engine, PROMPTS[2], max_completion_length=20)
        await engine.adopt(directories[PolicyVersion(1, 1)], PolicyVersion(1, 5))
        files = await sample(engine, PROMPTS[2], max_completion_length=20)
    finally:
        await engine.close()
    models = {version: load(directory) for version, directory in directories.items()}
    models[PolicyVersion(1, 5)] = models[PolicyVersion(1, 1)]
    assert [version.number for version, _, _ in results[0].spans()] == [0, 1, 2, 3]
    for result in [*results, kept, files]:
        assert worst(result, mixed_forward(models, result)) < 1e-3
    assert worst(results[0], mixed_forward(dict.fromkeys(models, models[BEGUN]), results[0])) > 0.05


def to_be_sent(root: Path, store: WeightExporter, model: Path, version: PolicyVersion, sender: str) -> Path:
    """Put a model's weights into the sender's store; the directory that says so to an engine."""
    tensors = {name: tensor.clone() for name, tensor in load_file(model / "model.safetensors").items()}
    sha256 = store.export(tensors, {"config.json": "{}"}, version, version.number, 0.0)
    directory = root / "to-be-sent" / str(version)
    directory.mkdir(parents=True)
    said = SentVersion(sender=sender, version=version, manifest_sha256=sha256)
    (directory / SENT).write_text(said.model_dump_json())
    return directory


async def test_weights_that_arrive_damaged_end_the_engine(
    tmp_path: Path,
    vllm_decoder: KeptDecoder,
    no_eos_dir: Path,
    no_eos_version: MakeVersion,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, version = WeightExporter(tmp_path / "store", 8), PolicyVersion(1, 1)
    load_version = WeightSender._load

    async def damaged(self: WeightSender, asked: Any) -> Any:
        loaded = await load_version(self, asked)
        name = next(iter(loaded.tensors))
        loaded.tensors[name].view(-1)[0] += 1.0  # behind the sums  # type: ignore[index]
        return loaded

    monkeypatch.setattr(WeightSender, "_load", damaged)
    engine = ThreadedEngine(vllm_decoder.of(no_eos_dir), SLOTS)
    await engine.start()
    try:
        async with sending(store, 30.0) as address:
            await engine.adopt(no_eos_dir, BEGUN)
            directory = to_be_sent(tmp_path, store, no_eos_version(1), version, address)
            with pytest.raises(EngineError, match="got another in rank 0"):
                await engine.adopt(directory, version)
            with pytest.raises(EngineError):
                await sample(engine, PROMPTS[1], max_completion_length=5)
    finally:
        await engine.close()


def test_ranks_get_the_same_nccl_messages_as_from_vllms_own_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl_engine = pytest.importorskip("vllm.distributed.weight_transfer.nccl_engine")
    told: dict[str, Any] = {}
    client = _NoControl()
    monkeypatch.setattr(client, "init_weight_transfer_engine", lambda info: told.update(meeting=info))
    monkeypatch.setattr(client, "update_weights", lambda info: told.update(tensors=info))
    monkeypatch.setattr(weight_groups, "_NoControl", lambda: client)
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: object())
    group = NcclGroup("10.0.0.1", 4, 5.0)
    tensors = {"w": torch.zeros(7, 5, dtype=torch.bfloat16), "b": torch.zeros(3)}
    with pytest.raises((RuntimeError, AssertionError)):  # torch: there is no device here
        group.send(tensors)
    read = nccl_engine.NCCLWeightTransferInitInfo  # by the ranks
    assert read(**group.meeting) == read(**told["meeting"])
    turn = SendingTurn(meeting={}, **listed(tensors), sums=(0, 0))
    assert told["tensors"] == turn.update_info
