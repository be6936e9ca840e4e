"""Tiny random Qwen2 models with a tokenizer, and the same models after imagined optimizer steps."""

import importlib.util
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from streamrl.producers.generation.engines.factory import build_decoder, build_engine
from streamrl.producers.generation.engines.model_files import ModelFacts, read_facts
from streamrl.producers.generation.engines.port import Engine
from streamrl.producers.generation.engines.threaded import ThreadedEngine
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.producers.generation.tokenizer import ModelTokenizer
from streamrl.producers.generation.vocabulary import EndTokens
from streamrl.schemas.trajectories import SamplingParams
from tests.producers.generation.engines.sharp_model import sharp_model
from tests.progress import bounded_by_progress

VOCAB = 128
EOS = 1
UNKNOWN = {"unk_token": "<pad>"}
SPECIAL = {"pad_token": "<pad>"}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)

MakeVersion = Callable[[int], Path]
Build = Callable[..., Engine]
SLOTS = 8
GONE_S = 30.0
"""More than the end of a process takes, once it was told to."""
TREE = "STREAMRL_TEST_TREE"
"""Variable by which a process is known as one that a test started, though whoever started it has ended."""
os.environ[TREE] = f"{os.getpid()}-{time.time_ns()}"


class KeptDecoder:
    """A loaded vLLM decoder for one engine after another: starting its processes takes long.

    They end with the thread that loaded it. An engine's first weights are those of the one before.
    """

    processes: ClassVar[set[psutil.Process]] = set()
    """Of all that are kept: no test has left them behind."""

    def __init__(self, decoder: Any, facts: ModelFacts, adopt: str = "in_flight") -> None:
        self._decoder, self._facts, self._adopt = decoder, facts, adopt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def of(self, model: Path, adopt: str = "in_flight") -> "KeptDecoder":
        """The same under another model's facts, of equal sizes; it takes weights as ``generation.adopt`` says."""
        return KeptDecoder(self._decoder, read_facts(str(model), None), adopt)

    def load(self) -> ModelFacts:
        self._decoder._facts = self._facts
        self._decoder._settings = self._decoder._settings.model_copy(update={"adopt": self._adopt})
        return self._facts

    def close(self) -> None:
        self._decoder.clear()


# The vLLM environment runs this folder's tests of vLLM, and need not have what the others are written with.
collect_ignore = [] if importlib.util.find_spec("hypothesis") else ["test_stop_matcher.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of vLLM are skipped where it is not installed, and bounded by progress where it is."""
    is_missing = importlib.util.find_spec("vllm") is None
    skip = pytest.mark.skip(reason="the vllm package is not installed in this interpreter; use .venv-vllm")
    for item in items:
        if item.get_closest_marker("vllm"):
            # The first marker found is the one that counts, and a module's own would be.
            item.own_markers.insert(0, (skip if is_missing else pytest.mark.timeout(0)).mark)


def _bounded(item: pytest.Item) -> AbstractContextManager[None]:
    return bounded_by_progress() if item.get_closest_marker("vllm") else nullcontext()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """What starts an engine."""
    with _bounded(item):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """The test."""
    with _bounded(item):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """What ends an engine."""
    with _bounded(item):
        return (yield)


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test fails that leaves processes or threads of an engine behind; they are ended before the next begins."""
    with nothing_left() if request.node.get_closest_marker("vllm") else nullcontext():
        yield


@contextmanager
def nothing_left(gone_s: float = GONE_S) -> Iterator[None]:
    """End what engines within left behind, and fail if there was any."""
    before = engine_processes(), engine_threads()
    yield
    processes = engine_processes() - before[0] - KeptDecoder.processes
    _, left = psutil.wait_procs(processes, timeout=gone_s)
    for process in left:
        process.kill()
    psutil.wait_procs(left)
    threads = engine_threads() - before[1]
    for thread in threads:
        thread.join(gone_s)  # without its processes it ends
    assert not left, "a test closes its engine"
    assert not threads, "a test closes its engine"


def engine_processes() -> set[psutil.Process]:
    """All that were started by this process, or by one that it started and that has ended."""
    # By descent as well: a process that gives itself a title, as vLLM's do, writes it over its variables.
    found = set(psutil.Process().children(recursive=True))
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(TREE) == os.environ[TREE]:
                found.add(process)
    return {process for process in found if not _is_pythons_own(process)}


def _is_pythons_own(process: psutil.Process) -> bool:
    """One that stays to the end, or that has ended by now."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE or "resource_tracker" in " ".join(process.cmdline())
    except psutil.Error:
        return True


def engine_threads() -> set[threading.Thread]:
    """Threads of our engines."""
    return {thread for thread in threading.enumerate() if thread.name.endswith("-engine")}


def build_model(directory: Path, eos_token_id: int | None, *, tied: bool = False) -> Path:
    """Write a two-layer Qwen2 with sharp random weights."""
    model = sharp_model(VOCAB, 1024, eos_token_id, tied=tied)
    model.generation_config.eos_token_id = eos_token_id
    model.save_pretrained(directory)
    letters = {"<pad>": 0, "<eos>": EOS} | {chr(index + 30): index for index in range(2, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(letters, **UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    end = None if eos_token_id is None else "<eos>"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, **SPECIAL).save_pretrained(directory)
    return directory


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that ends by itself now and then."""
    return build_model(tmp_path_factory.mktemp("model"), EOS)


@pytest.fixture(scope="session")
def no_eos_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without an end-of-sequence token."""
    return build_model(tmp_path_factory.mktemp("no_eos"), None)


@pytest.fixture(scope="session")
def undecided_dir(no_eos_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as unsure as one in training, of 2 to 3 nats a token: truncation takes much, and logits are not large."""
    directory = tmp_path_factory.mktemp("undecided")
    model = AutoModelForCausalLM.from_pretrained(no_eos_dir, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.4)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def no_eos_version(no_eos_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeVersion:
    """Writes version n of the model without an end token: clearly different weights, the same for the same n."""

    def make(number: int) -> Path:
        directory = tmp_path_factory.mktemp(f"version-{number}-")
        model = AutoModelForCausalLM.from_pretrained(no_eos_dir)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
        model.save_pretrained(directory)
        return directory

    return make


@pytest.fixture(scope="session")
def characters_dir(no_eos_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model without an end token, its tokenizer with one, which JSON schemas need; a character a token, and a
    template that reads tools.
    """
    directory = tmp_path_factory.mktemp("characters")
    shutil.copytree(no_eos_dir, directory, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", **SPECIAL)
    made.chat_template = TEMPLATE
    made.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def vllm_decoders(characters_dir: Path, undecided_dir: Path) -> Iterator[tuple[KeptDecoder, KeptDecoder]]:
    """Two engines that start at once in one process, each in a thread of its own."""
    plain = GenerationSettings(engine="vllm", max_num_seqs=SLOTS)
    truncating = SamplingParams(max_completion_length=40, temperature=0.7, top_p=0.5)
    engines = [
        build_decoder(plain, characters_dir, keeps_to_schemas=True, transfer="gloo"),
        build_decoder(plain.model_copy(update={"max_num_seqs": 2 * SLOTS}), undecided_dir, truncating),
    ]
    with ExitStack() as stack:
        # Threads that stay: with its thread an engine's processes would end.
        threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in engines]
        loading = [thread.submit(decoder.load) for thread, decoder in zip(threads, engines, strict=True)]
        for decoder in engines:
            stack.callback(decoder.close)
            stack.callback(decoder.give_up)
        first, second = (one.result() for one in loading)
        # Only JSON ends: tests of everything else need completions that run to their limit.
        engines[0]._facts = first = replace(first, ends=EndTokens({}, {}))  # type: ignore[attr-defined]
        KeptDecoder.processes |= engine_processes()
        yield KeptDecoder(engines[0], first), KeptDecoder(engines[1], second)


@pytest.fixture(scope="session")
def vllm_decoder(vllm_decoders: tuple[KeptDecoder, KeptDecoder]) -> KeptDecoder:
    """Of the model without an end token, with room for SLOTS completions; takes files, senders' weights and schemas."""
    return vllm_decoders[0]


@pytest.fixture(scope="session")
def truncating_decoder(vllm_decoders: tuple[KeptDecoder, KeptDecoder]) -> KeptDecoder:
    """Of a run that truncates the undecided model's distribution at temperature 0.7; room for 2 x SLOTS."""
    return vllm_decoders[1]


@pytest.fixture
def build(engine: str, request: pytest.FixtureRequest) -> Build:
    """Builds an engine with SLOTS slots of the kind that the test's parameter names; vLLM's processes are shared."""
    if engine != "vllm":
        settings = GenerationSettings(max_num_seqs=SLOTS, device="cpu")
        return lambda model, chunk_tokens=32, adopt="in_flight": build_engine(
            settings.model_copy(update={"adopt": adopt}), model, chunk_tokens=chunk_tokens
        )
    kept: KeptDecoder = request.getfixturevalue("vllm_decoder")
    return lambda model, chunk_tokens=32, adopt="in_flight": ThreadedEngine(
        kept.of(model, adopt), SLOTS, chunk_tokens, open_tokenizer=partial(ModelTokenizer, str(model))
    )
