import importlib
import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from streamrl.producers.prompts.gym import WITHOUT_WHEEL, open_dataset
from streamrl.producers.prompts.settings import DataSettings
from streamrl.producers.prompts.sources import PASS_SIZE, ReasoningGymSource, open_source, scoring_entry
from streamrl.producers.rewards.builtin import DATASET
from streamrl.producers.rewards.child import load_reward
from streamrl.schemas.errors import DataError, RewardLoadError


def _source(seed: int = 0, size: int = PASS_SIZE, **settings: Any) -> ReasoningGymSource:
    return ReasoningGymSource(DataSettings.model_validate({"dataset": "chain_sum", **settings}), seed, size)


def is_even(entry: dict[str, Any]) -> bool:
    return int(entry["answer"]) % 2 == 0


def never(entry: dict[str, Any]) -> bool:
    return False


def test_the_same_position_gives_the_same_prompt_in_any_order() -> None:
    forwards = [_source().prompt_at(position) for position in range(8)]
    source = _source()
    assert [source.prompt_at(position) for position in reversed(range(8))] == forwards[::-1]
    assert _source(seed=999_983).prompt_at(0)[0].content != forwards[0][0].content


def test_a_new_pass_repeats_the_prompts_under_the_same_names() -> None:
    source = _source(size=5)
    first, again = source.prompt_at(2), source.prompt_at(7)
    assert (first[0], 0, 1) == (again[0], first[1], again[1])


def test_a_refused_entry_is_replaced_and_never_used_twice() -> None:
    source = _source(size=40, filter=f"{__name__}:is_even")
    prompts = [source.prompt_at(position)[0] for position in range(40)]
    assert all(is_even({"answer": prompt.columns["answer"]}) for prompt in prompts)
    assert len({prompt.prompt_id for prompt in prompts}) == len({str(prompt.content) for prompt in prompts}) == 40


def test_a_filter_that_accepts_nothing_is_an_error() -> None:
    with pytest.raises(DataError, match="to accept one of 100 entries"):
        _source(filter=f"{__name__}:never").prompt_at(0)


def test_a_mixture_follows_its_weights_and_options() -> None:
    mixture = {"chain_sum": {"weight": 3, "options": {"min_terms": 2, "max_terms": 2}}, "gcd": 1}
    source = _source(dataset=None, mixture=mixture)
    prompts = [source.prompt_at(position)[0] for position in range(400)]
    counts = Counter(prompt.dataset for prompt in prompts)
    assert 270 <= counts["chain_sum"] <= 330
    sums = [prompt for prompt in prompts if prompt.dataset == "chain_sum"]
    assert {prompt.columns["metadata"]["num_terms"] for prompt in sums} == {2}  # type: ignore[index,call-overload]


def test_an_unknown_data_set_names_its_neighbours() -> None:
    with pytest.raises(DataError, match="chain_sum"):
        open_dataset("chain_sums", {})


@pytest.mark.parametrize("options", [{"min_terms": 0}, {"min_termz": 2}, {"min_terms": "two"}])
def test_a_wrong_option_is_an_error_in_one_line(options: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="options that data set 'chain_sum' accepts"):
        open_dataset("chain_sum", options)


@pytest.mark.parametrize(
    "name", ["chain_sum", "arc_1d", "rearc", "graph_color", "knights_knaves", "complex_arithmetic"]
)
def test_columns_are_all_that_the_scorer_needs_after_the_wire(name: str) -> None:
    prompt = _source(dataset=name, size=20).prompt_at(3)[0]
    entry = scoring_entry(type(prompt).model_validate_json(prompt.model_dump_json()).columns)
    answer = entry["answer"]
    if name == "graph_color":
        answer = json.dumps(entry["metadata"]["possible_answer"])
    dataset = open_dataset(name, {})
    assert dataset.score_answer(answer, entry) == 1.0
    assert dataset.score_answer("nonsense", entry) < 1.0


@pytest.mark.processes
def test_the_library_is_imported_only_when_a_data_set_is_opened() -> None:
    code = "import streamrl.producers.prompts.sources, sys; print('reasoning_gym' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def _without(*packages: str) -> str:
    """Code of a process that cannot find these packages; as a None in sys.modules, and not found by find_spec."""
    return f"""
import importlib.util, sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in {packages!r} else found(name, *rest)
"""


EVERY_DATA_SET = """
import json, random
from streamrl.producers.prompts.gym import import_reasoning_gym, open_dataset
from streamrl.producers.rewards.builtin import DATASET
from streamrl.producers.rewards.child import load_reward
from streamrl.schemas.errors import DataError, RewardLoadError
refused = {}
for name in import_reasoning_gym().DATASETS:
    if name == "composite":  # made of others, which its options name
        continue
    try:
        dataset = open_dataset(name, {}, size=2)
    except DataError as error:
        refused[name] = str(error)
    else:
        entry = dataset[0]
        assert 0 <= dataset.score_answer(entry["answer"], entry) <= 1, name
print()
print(json.dumps([refused, sorted(WITHOUT & set(sys.modules))]))
"""


@pytest.mark.processes
def test_every_data_set_works_or_is_refused_by_name() -> None:
    """Where all that has no wheel is missing: one process, so that nothing of the library is imported already."""
    code = _without(*WITHOUT_WHEEL) + f"WITHOUT = set({list(WITHOUT_WHEEL)})" + EVERY_DATA_SET
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    refused, left = json.loads(done.stdout.splitlines()[-1])
    assert set(refused) == {name for names in WITHOUT_WHEEL.values() for name in names}
    for package, names in WITHOUT_WHEEL.items():
        assert all(
            f"the package {package}" in refused[name] and f"pip install {package}" in refused[name] for name in names
        )
    # A stand-in is seen by the library alone.
    assert left == []


def test_a_missing_library_is_said_in_one_line_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError("No module named 'reasoning_gym'", name="reasoning_gym")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(
        DataError, match=r"optional package reasoning-gym.*pip install 'streamrl\[reasoning-gym\]'"
    ) as caught:
        open_source(DataSettings.model_validate({"dataset": "gcd"}))
    assert "\n" not in str(caught.value)
    with pytest.raises(RewardLoadError, match="optional package reasoning-gym"):
        load_reward(DATASET)


def test_the_runs_seed_holds_unless_the_data_has_its_own() -> None:
    unset, own = (DataSettings.model_validate({"dataset": "gcd", "seed": seed}) for seed in (None, 70_000))
    assert open_source(unset, run_seed=70_000).prompt_at(0) == open_source(own, run_seed=5).prompt_at(0)
