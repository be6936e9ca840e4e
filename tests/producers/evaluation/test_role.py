import json
import re
from pathlib import Path
from typing import Any

import pytest

from streamrl.producers.evaluation.role import FEATURE
from streamrl.producers.evaluation.settings import HeldOutSettings
from streamrl.producers.grading.settings import GradedRewards
from streamrl.schemas.errors import SettingsError, UserError
from streamrl.settings.features import awaited, features
from streamrl.settings.loading import as_toml, load_settings, validated
from tests.pipeline.tiny_model import save_tiny_model


def test_held_out_prompts_and_graders_are_refused_together() -> None:
    graded = [
        *("--data.dataset=chain_sum", "--model.path=m"),
        *('--rewards.functions=["exact_match"]', '--rewards.graded=["exact_match"]'),
    ]
    assert load_settings(None, graded).section(GradedRewards).graded
    with pytest.raises(SettingsError, match="only workers score held-out completions"):
        load_settings(None, [*graded, "--evaluation.data.held_out.dataset=chain_sum"])


def test_a_completion_of_the_right_format_alone_passes_nowhere() -> None:
    given = [
        *("--data.dataset=chain_sum", "--model.path=m", "--evaluation.data.held_out.dataset=chain_sum"),
        '--rewards.functions=["math_verify", "format"]',
    ]
    for passes in ([], ["--evaluation.passes_at=1.5"], ['--evaluation.passes_at="math_verify"']):
        load_settings(None, [*given, *passes])
    with pytest.raises(SettingsError, match="passes_at above 1, since a completion of the right format alone would"):
        load_settings(None, [*given, "--evaluation.passes_at=1"])
    with pytest.raises(SettingsError, match=r"the name of a reward \(math_verify, format\) .* got 'accuracy'"):
        load_settings(None, [*given, "--evaluation.passes_at=accuracy"])
    with pytest.raises(SettingsError, match=r"one of rewards\.weights above 0, or evaluation\.passes_at"):
        load_settings(None, [*given, "--rewards.weights=[0, -1]"])
    load_settings(None, [*given[:2], given[3], "--rewards.weights=[0, -1]"])


@pytest.mark.processes
async def test_held_out_sets_are_read_rendered_and_scored_before_the_start(tmp_path: Path) -> None:
    held_out = tmp_path / "held-out.jsonl"
    model = save_tiny_model(tmp_path / "model")
    settings = load_settings(
        None,
        [
            *(f"--model.path={model}", "--data.path=p.jsonl", '--rewards.functions=["exact_match"]'),
            *(f"--evaluation.data.held_out.path={held_out}", "--loop.max_prompt_length=8"),
        ],
    )
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}, {"prompt": "too long for it"}]
    for given, told in (
        (rows[:2], "held_out: 2 prompts, exact_match pays 1 for own answers; a completion passes if exact_match >= 1"),
        (rows[2:], "got 1 of 1 prompts of held_out that would be refused: 1 longer than 8 tokens"),
        ([{"prompt": "1+1="}], "to score completions in held_out, got errors on 1 of 1 rows, .*column 'answer'"),
    ):
        held_out.write_text("".join(json.dumps(row) + "\n" for row in given))
        try:
            found = await FEATURE.start.try_out(settings)
        except UserError as error:
            found = str(error)
        assert re.search(told, found or "")


CONFIG = """
[model]
path = "m"
[data]
path = "train.jsonl"
answer_column = "solution"
prompt_template = "Q: {prompt}"
system_prompt = "Be brief."
chat_template_kwargs = { enable_thinking = false }
[rewards]
functions = ["exact_match"]
[evaluation.data]
same.path = "held-out.jsonl"
hub = { path = "org/set", split = "test", format = "openrlhf", prompt_template = "{prompt}" }
bare = { path = "bare.jsonl", system_prompt = "none", answer_column = "none" }
made.dataset = "gcd"
"""


def test_a_held_out_set_has_the_format_of_the_trained_prompts_unless_it_has_its_own(tmp_path: Path) -> None:
    config = tmp_path / "streamrl.toml"
    config.write_text(CONFIG)
    settings = load_settings(config, ["--data.prompt_column=question"])
    sets = settings.section(HeldOutSettings).data
    assert {
        name: (one.format, one.prompt_column, one.answer_column, one.prompt_template, one.system_prompt)
        for name, one in sets.items()
    } == {
        "same": ("trl", "question", "solution", "Q: {prompt}", "Be brief."),
        "hub": ("openrlhf", None, None, "{prompt}", "Be brief."),
        "bare": ("trl", "question", None, "Q: {prompt}", None),
        "made": ("trl", None, None, "Q: {prompt}", "Be brief."),
    }
    assert all(one.chat_template_kwargs == {"enable_thinking": False} for one in sets.values())
    # The processes of a run read the resolved settings, in which nothing is left to take over.
    config.write_text(as_toml(settings))
    assert load_settings(config, []) == settings
    assert load_settings(config, ["--data.system_prompt=Else."]).section(HeldOutSettings).data == sets


def test_template_variables_of_a_set_of_its_own_are_refused_since_no_worker_would_read_them() -> None:
    given = ["--data.dataset=chain_sum", "--model.path=m", "--evaluation.data.held_out.dataset=gcd"]
    variables = "--evaluation.data.held_out.chat_template_kwargs={enable_thinking = false}"
    with pytest.raises(SettingsError, match=r"the chat_template_kwargs of \[data\] in \[evaluation\.data\.held_out\]"):
        load_settings(None, [*given, variables])


@pytest.mark.parametrize(
    ("data", "held_out", "is_trained"),
    [
        ({"path": "a.jsonl"}, {"path": "a.jsonl"}, True),
        ({"path": "a.jsonl"}, {"path": "a.jsonl", "split": "train[:9]"}, True),
        ({"path": "a.jsonl", "split": "train[9:]"}, {"path": "a.jsonl", "split": "train[:9]"}, False),
        ({"path": "a.jsonl"}, {"path": "b.jsonl"}, False),
        ({"dataset": "gcd"}, {"dataset": "gcd", "seed": 79}, True),  # ten steps of eight prompts are trained
        ({"dataset": "gcd"}, {"dataset": "gcd", "seed": 80}, False),
        ({"dataset": "gcd", "seed": 63}, {"dataset": "gcd"}, True),  # 64 are evaluated
        ({"dataset": "gcd", "seed": 64}, {"dataset": "gcd"}, False),
        ({"dataset": "gcd"}, {"dataset": "lcm"}, False),
        ({"dataset": "gcd", "options": {"max_num": 9}}, {"dataset": "gcd"}, False),
        ({"requests_only": True}, {"dataset": "gcd"}, False),
    ],
)
def test_prompts_that_are_held_out_and_trained_are_noted(data: Any, held_out: Any, is_trained: bool) -> None:
    tree: dict[str, Any] = {"model": {"path": "m"}, "data": data, "evaluation": {"data": {"test": held_out}}}
    tree |= {"training": {"max_steps": 10}, "loop": {"groups_per_step": 8}, "gateway": {"enabled": True}}
    notes = FEATURE.start.notes(validated(tree | {"evaluation": {"every": 10, **tree["evaluation"]}}))
    assert [note.startswith("the run trains on prompts of the held-out set test; give") for note in notes] == (
        [True] * is_trained
    )
    (*_, late) = FEATURE.start.notes(validated(tree | {"evaluation": {"every": 11, **tree["evaluation"]}}))
    assert late.startswith("only the initial weights will be evaluated, since evaluation.every = 11 is above")


def test_held_out_prompts_that_another_file_has_for_training_are_noted(tmp_path: Path) -> None:
    user = {"role": "user", "content": "3+3="}
    trained = ["1+1=", [{"role": "user", "content": "2+2="}], [{"role": "system", "content": "s"}, user]]
    held_out = ["1+1= ", "2+2=", [{"role": "system", "content": "s"}, user], [user], "4+4="]
    for name, prompts in (("train", trained), ("test", held_out)):
        rows = "".join(json.dumps({"prompt": prompt, "answer": "7"}) + "\n" for prompt in prompts)
        (tmp_path / f"{name}.jsonl").write_text(rows)
    sets = {name: {"path": str(tmp_path / f"{name}.jsonl")} for name in ("train", "test")}
    tree = {"model": {"path": "m"}, "data": sets["train"], "evaluation": {"data": {"seen": sets["test"]}, "every": 1}}
    (note,) = FEATURE.start.notes(validated(tree))
    assert re.match(
        r"3 of 5 prompts of the held-out set seen are trained, too, such as test/[123]; take them out", note
    )
    assert FEATURE.start.notes(validated(tree | {"data": {"path": str(tmp_path / "none.jsonl")}})) == []


def test_an_interval_of_0_turns_the_evaluation_off() -> None:
    options = ["--data.dataset=chain_sum", "--model.path=m", "--evaluation.data.held_out.dataset=gcd"]
    settings = load_settings(None, [*options, "--evaluation.every=0"])
    assert "evaluator" not in [child.name for feature in features() for child in feature.processes.started(settings)]
    assert awaited(settings) is None
    assert awaited(load_settings(None, options)) is not None
