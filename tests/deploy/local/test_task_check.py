"""The check refuses a run that cannot succeed, and warns about problems that affect a part of the run."""

import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from safetensors.torch import load_file, save_file

from streamrl.deploy.local import task_check
from streamrl.deploy.local.forking import ForkServer
from streamrl.deploy.local.task_check import (
    FLOOR_BYTES,
    SampledPrompts,
    check_task,
    checked,
    disk_room,
    never_ends,
    require_readable,
)
from streamrl.init.preflight import check_engine, check_storage
from streamrl.planning.measuring import endless_model
from streamrl.schemas.errors import ModelError, RewardLoadError, UserError
from streamrl.settings.loading import validated
from streamrl.settings.tree import Settings
from tests.pipeline.tiny_model import save_tiny_model

REWARDS = """
def length(completions, **columns):
    return [float(len(completions[0]))]

def never(completions, **columns):
    print("a line of the user's own")
    raise KeyError("answer")

def often(completions, prompts, **columns):
    return [1.0 / (int(prompts[0][-1]) % 2)]

def seldom(completions, **columns):
    return [1.0 / len(completions[0])]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def models() -> Iterator[ForkServer]:
    """Forks processes that have imported nothing yet."""
    with ForkServer(()) as server:
        yield server


@pytest.fixture
def task(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes settings for given prompts and a reward. The model takes 128 tokens, one of them for the completion."""
    (tmp_path / "own_reward.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)

    def settings(prompts: Sequence[Any], reward: str = "length", path: Path = model) -> Settings:
        (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        tree = {"model": {"path": str(path)}, "data": {"path": "p.jsonl"}}
        run = {"name": "tried", "directory": str(tmp_path / "runs")}
        return validated(tree | {"run": run, "rewards": {"functions": [f"own_reward:{reward}"]}})

    return settings


def test_a_file_that_may_not_be_read_is_named_with_its_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    weights = model / "model.safetensors"
    weights.write_bytes(b"")
    weights.chmod(0o600)
    require_readable(model, "model.path")
    require_readable(tmp_path / "none", "model.path")
    # Tests may run as root, which may read everything.
    monkeypatch.setattr(os, "access", lambda path, _mode: path != weights)
    with pytest.raises(
        UserError, match=rf"readable for this process \(uid \d+\), got {weights} with mode 0600 of uid"
    ) as told:
        require_readable(model, "model.path")
    assert str(told.value).endswith(f"chmod -R a+rX {model}")


@pytest.mark.processes
def test_a_mixture_with_too_long_prompts_goes_on_with_a_warning(task: Any) -> None:
    (warning,) = checked(task(["x" * 127, "x" * 128, "short", "x" * 300]))
    assert warning.startswith("2 of 4 prompts will be refused and skipped: 2 longer than 127 tokens; p/")
    assert checked(task(["x" * 127, "short"])) == []


@pytest.mark.processes
def test_a_model_without_an_end_goes_on_with_a_warning(task: Any, model: Path, tmp_path: Path) -> None:
    settings = task(["short"], path=endless_model(str(model), tmp_path / "endless"))
    assert checked(settings) == [never_ends(settings)]


def test_columns_of_bytes_are_noted_by_name(task: Any, tmp_path: Path) -> None:
    table = {"prompt": ["short"], "picture": [{"bytes": b"\xff7", "path": "a.png"}], "parts": [[b"1"]], "n": ["7"]}
    pyarrow.parquet.write_table(pa.table(table), tmp_path / "p.parquet")
    settings = task(["short"])
    data = settings.data.model_copy(update={"path": "p.parquet"})
    prompts = SampledPrompts(settings.model_copy(update={"data": data}))
    assert prompts.notes == ["rewards get the bytes of column parts, picture as base64 text"]


def test_a_template_that_names_other_columns_is_noted(task: Any) -> None:
    settings = task(["short"])
    Path("p.jsonl").write_text('{"prompt": "ab", "level": 3, "answer": "7"}\n')
    template = "{level} {prompt} in \\boxed{answer} and {other}"
    data = settings.data.model_copy(update={"prompt_template": template})
    prompts = SampledPrompts(settings.model_copy(update={"data": data}))
    assert prompts.notes == ["data.prompt_template replaces {prompt} alone: {level} stays as it is"]


def test_a_column_that_other_loops_show_to_the_model_is_noted(task: Any) -> None:
    settings = task(["short"])
    Path("p.jsonl").write_text('{"prompt": "ab", "documents": ["d"], "answer": "7"}\n')
    assert SampledPrompts(settings).notes == [
        "rewards get column documents, the model does not see it; put it into the prompts"
    ]


def test_a_pointless_run_is_refused_with_one_of_the_prompts_that_cannot_be_sampled(task: Any) -> None:
    with pytest.raises(ModelError, match=r"3 of 3 prompts that would be refused: 3 longer than 127 tokens; p/.*128"):
        checked(task(["x" * 128] * 3))
    with pytest.raises(ModelError, match=r"19 of 20 prompts that would be refused"):
        checked(task(["x" * 128] * 19 + ["short"]))
    with pytest.raises(ModelError, match="2 no chat template; p/"):
        checked(task([[{"role": "user", "content": "hi"}]] * 2))


@pytest.mark.processes
def test_a_reward_that_scores_nothing_is_refused_and_one_that_sometimes_fails_is_not(task: Any) -> None:
    with pytest.raises(RewardLoadError, match=r"reward never to score.* on 2 of 2 rows, .*: p/\d: KeyError: 'answer'"):
        checked(task(["a", "b"], "never"))
    with pytest.raises(RewardLoadError, match=r"reward often to score.* on 4 of 8 rows.*ingest.max_unrewarded_share"):
        checked(task([f"row {number}" for number in range(8)], "often"))
    assert checked(task(["a", "b"], "seldom")) == []  # it fails only on empty completions


@pytest.mark.processes
def test_the_check_runs_in_a_process_of_its_own_and_its_refusal_is_one_line(
    task: Any, tmp_path: Path, model: Path, models: ForkServer
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        (bare / file).write_bytes((model / file).read_bytes())
    with pytest.raises(UserError, match=r"expected a tokenizer at .*bare, got a model without one") as refusal:
        check_task(task(["a"], path=bare), models)
    assert "\n" not in str(refusal.value)


@pytest.mark.processes
def test_the_check_says_what_it_does(task: Any) -> None:
    stages: list[str] = []
    checked(task(["a", "b"]), enter=stages.append)
    assert stages == [
        "reading the model's files",
        "looking for the engine and its devices",
        "trying optional features",
        "loading the tokenizer",
        "opening the prompts",
        "reading 2 of 2 prompts",
        "calling the reward functions for 2 rows",
    ]
    stages.clear()
    checked(task(["a", "b"]), resumed=True, enter=stages.append)
    assert stages == ["reading the model's files", "looking for the engine and its devices"]


@pytest.mark.processes
def test_what_the_check_does_is_known_outside_its_process(
    task: Any, models: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[str] = []

    @contextmanager
    def told(what: str, stage: Callable[[], str]) -> Iterator[None]:
        known.append(f"{what}: {stage()}")
        yield
        known.append(f"{what}: {stage()}")

    monkeypatch.setattr(task_check, "told_if_long", told)
    check_task(task(["a", "b"]), models)
    assert known == [
        "checking the task: loading libraries",
        "checking the task: calling the reward functions for 2 rows",
    ]


def test_a_model_without_weights_is_refused_before_the_start(task: Any, model: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ModelError, match=r"got OSError: Error no file named model\.safetensors"):
        checked(task(["short"], path=bare), resumed=True)


def test_weights_that_cannot_be_trained_are_refused_before_the_start(task: Any, model: Path, tmp_path: Path) -> None:
    blank = shutil.copytree(model, tmp_path / "blank")
    tensors = load_file(blank / "model.safetensors")
    save_file({name: tensor * 0 for name, tensor in tensors.items()}, blank / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"weights that can be trained at .*blank, got: weights are zero"):
        checked(task(["short"], path=blank))


def test_a_missing_algorithm_of_the_users_own_is_reported_before_the_start(task: Any) -> None:
    settings = task(["short"])
    own = settings.algorithm.model_copy(update={"name": "own_reward:Algorithm"})
    with pytest.raises(UserError, match="expected a function 'Algorithm' in own_reward, got none"):
        checked(settings.model_copy(update={"algorithm": own}))


def with_free_bytes(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=free))


def test_a_run_is_refused_for_the_disk_space_that_the_dry_run_misses(
    task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = task(["a"])
    with_free_bytes(monkeypatch, FLOOR_BYTES)  # nothing is left for the model
    with pytest.raises(
        UserError, match=r"^expected enough disk space, got too little: about 1.1 GB .*, 1.1 GB free at .*;"
    ):
        checked(settings)
    with pytest.raises(UserError, match="expected enough disk space"):
        checked(settings, resumed=True)
    _, disk = check_storage(settings, 27_040)
    assert (disk.state, disk.detail) == ("fail", str(disk_room(settings, 27_040)))
    assert disk.detail.endswith("free space, keep fewer checkpoints, or set run.directory")


def test_space_that_a_run_already_uses_is_not_demanded_again(task: Any, tmp_path: Path) -> None:
    settings, parameters = task(["a"]), 1 << 20
    copies = 3 * (settings.training.keep_checkpoints + 1) + settings.training.keep_weight_versions + 1
    bytes_to_come = 4 * parameters * (copies + settings.run.workers)
    assert disk_room(settings, parameters).needed == FLOOR_BYTES + bytes_to_come
    held = settings.run.path / "checkpoints" / "step_1" / "trainer_state"
    held.mkdir(parents=True)
    (held / "moments").write_bytes(os.urandom(1 << 16))  # random bytes, which no file system compresses
    with (held / "sparse").open("wb") as sparse:
        sparse.truncate(1 << 30)
    there = FLOOR_BYTES + bytes_to_come - disk_room(settings, parameters).needed
    assert 1 << 16 <= there < 1 << 17, "sizes are counted in blocks on the disk"
    assert disk_room(settings, 100).needed == FLOOR_BYTES


def test_no_room_is_asked_for_more_versions_and_checkpoints_than_there_will_be(task: Any) -> None:
    settings = task(["a"])
    more = {"max_steps": 7, "checkpoint_every": 2, "keep_weight_versions": 10**6, "keep_checkpoints": 10**6}
    all_kept = settings.model_copy(update={"training": settings.training.model_copy(update=more)})
    versions, checkpoints = 8, 4  # with the initial weights; at steps 2, 4 and 6 and at the end
    copies = versions + settings.run.workers + 3 * (checkpoints + 1)  # one is complete before an old one is deleted
    assert disk_room(all_kept, 1000).needed == FLOOR_BYTES + 4 * 1000 * copies


@pytest.mark.processes
def test_an_engine_that_is_not_there_is_refused_unless_workers_join_from_elsewhere(
    task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name))
    settings = task(["a"])
    settings = settings.model_copy(update={"generation": settings.generation.model_copy(update={"engine": "vllm"})})
    with pytest.raises(ModelError, match="expected the vllm package"):
        checked(settings)
    with pytest.raises(ModelError, match="expected the vllm package"):
        check_engine(settings, None)
    elsewhere = settings.model_copy(update={"run": settings.run.model_copy(update={"workers": 0})})
    assert checked(elsewhere) == []
    assert check_engine(elsewhere, None).detail.startswith("workers started elsewhere")
