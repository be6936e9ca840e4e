"""The checklist of the dry run on a real model: each check alone, and all together."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from streamrl.deploy.local.task_check import never_ends, parameters_of
from streamrl.init import preflight
from streamrl.init.checklist import Check, closing_line
from streamrl.init.preflight import (
    check_amount,
    check_context,
    check_engine,
    check_lengths,
    check_model,
    check_next_turn,
    check_precision,
    check_prompts,
    check_rendering,
    check_storage,
    check_tokens,
    check_weights,
    dry_run,
    read_model,
    read_tokenizer,
)
from streamrl.init.reward_checks import check_opening, check_rewards
from streamrl.observability.metrics.settings import TrackingSettings
from streamrl.observability.metrics.tracking import check_installed
from streamrl.planning.measuring import endless_model
from streamrl.producers.generation.vocabulary import load_tokenizer
from streamrl.schemas.errors import ModelError, SettingsError, UserError
from streamrl.schemas.trajectories import ChatTurn, Prompt
from streamrl.settings.loading import validated
from streamrl.settings.tree import Settings
from tests.pipeline.tiny_model import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def settings_of(model: Path, directory: Path, **loop: Any) -> Settings:
    rewards = {"functions": ["exact_match"]}
    tree: dict[str, Any] = {"model": {"path": str(model)}, "data": {"path": "p.jsonl"}, "rewards": rewards}
    loop = {"max_prompt_length": 64, "max_completion_length": 32, **loop}
    return validated(tree | {"loop": loop, "run": {"name": "tried", "directory": str(directory)}})


def lengths(settings: Settings, prompts: list[Prompt], total: int | None = None) -> list[Check]:
    return check_lengths(settings, read_tokenizer(settings), prompts, read_model(settings), total)


def prompt(text: str) -> Prompt:
    return Prompt(prompt_id=f"p/{len(text)}", dataset="p", content=text)


def test_model_and_engine_say_what_they_are(model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, tmp_path)
    facts = read_model(settings)
    assert "Qwen2ForCausalLM" in check_model(facts, str(model)).detail
    assert "vocabulary 97, 128 positions" in check_model(facts, str(model)).detail
    assert check_engine(settings, facts).state == "ok"
    assert parameters_of(facts) == 27_040


def test_a_model_whose_weights_are_cut_short_fails(model: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(model, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"in model\.safetensors of [\d,]+ bytes: truncated"):
        check_model(read_model(settings_of(broken, tmp_path)), str(broken))


def test_tensors_that_the_model_has_no_place_for_are_noted(model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    save_file({**tensors, "model.layers.7.norm": torch.zeros(3)}, other / "model.safetensors", {"format": "pt"})
    note = check_model(read_model(settings_of(other, tmp_path)), str(other))
    assert note.state == "note"
    assert "it has no place for 1 tensors of its files, such as model.layers.7.norm: look at config" in note.detail


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        (lambda tensor: tensor * float("nan"), "weights are NaN or infinite"),
        (torch.zeros_like, "weights are zero"),
        (
            lambda tensor: tensor.to(torch.int8),
            "weights are whole numbers, as quantised ones are, which cannot be trained",
        ),
    ],
)
def test_weights_that_cannot_be_trained_fail(
    broken: Callable[[torch.Tensor], torch.Tensor], fault: str, model: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2 and "proj" in name)
    save_file({**tensors, name: broken(tensors[name])}, other / "model.safetensors", {"format": "pt"})
    (check,) = check_weights(settings_of(other, tmp_path))
    assert (check.state, check.detail) == ("fail", f"{other}: {fault} (1 tensors, such as {name})")
    assert check_weights(settings_of(model, tmp_path)) == []


def test_two_tensors_that_differ_and_should_be_one_fail(model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(other / "model.safetensors")
    head, embeddings = "lm_head.weight", tensors["model.embed_tokens.weight"]
    save_file(tensors | {head: embeddings.clone()}, other / "model.safetensors", {"format": "pt"})
    assert check_model(read_model(settings_of(other, tmp_path)), str(other)).state == "ok"
    changed = embeddings.clone()
    changed[-1, -1] += 1
    save_file(tensors | {head: changed}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"'lm_head.weight' to equal 'model.embed_tokens.weight' .* set it to false"):
        check_model(read_model(settings_of(other, tmp_path)), str(other))


def test_a_norm_may_be_zero_and_not_nan(model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    tensors, name = load_file(other / "model.safetensors"), "model.norm.weight"
    for factor, count in ((0.0, 0), (float("nan"), 1)):
        save_file({**tensors, name: tensors[name] * factor}, other / "model.safetensors", {"format": "pt"})
        assert len(check_weights(settings_of(other, tmp_path))) == count


def test_two_sets_of_weights_fail_if_they_differ(model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    second = other / "model-00001-of-00001.safetensors"
    save_file(tensors, second, {"format": "pt"})
    assert check_model(read_model(settings_of(other, tmp_path)), str(other)).state == "ok"
    save_file({name: tensor * 2 for name, tensor in tensors.items()}, second, {"format": "pt"})
    with pytest.raises(ModelError, match=r"expected one set of weights in .*other.* in two safetensors files"):
        check_model(read_model(settings_of(other, tmp_path)), str(other))


def test_a_warm_up_that_never_ends_is_noted(model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, tmp_path)
    training = settings.training.model_copy(update={"warmup_steps": 20, "max_steps": 20})
    (note,) = check_weights(settings.model_copy(update={"training": training}))
    assert note.detail.startswith("training.warmup_steps = 20 is not below training.max_steps = 20")


def test_a_template_that_does_not_open_the_models_turn_is_noted(model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    body = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    prompts = [Prompt(prompt_id="p/0", dataset="d", content=[{"role": "user", "content": "1+1"}])]
    for end, count in (("", 1), ("{% if add_generation_prompt %}assistant: {% endif %}", 0)):
        (other / "chat_template.jinja").write_text(body + end)
        assert len(check_next_turn(read_tokenizer(settings_of(other, tmp_path)), prompts)) == count


def test_ends_are_shown_and_a_model_without_one_is_noted(model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, tmp_path)
    facts = read_model(settings)
    shown = check_model(facts, str(model)).detail
    assert shown.endswith("positions; a completion ends at '<eos>' (1: generation_config, config, tokenizer)")
    assert check_tokens(settings, facts) == []
    endless = settings_of(endless_model(str(model), tmp_path / "endless"), tmp_path)
    (note,) = check_tokens(endless, read_model(endless))
    assert (note.state, note.detail) == ("note", never_ends(endless))
    assert "every completion will have loop.max_completion_length = 32 tokens" in note.detail
    long = settings.model_copy(update={"generation": settings.generation.model_copy(update={"max_model_len": 500})})
    assert [note.detail for note in check_tokens(long, read_model(long))] == [
        "generation.max_model_len = 500 is more than the model's 128 positions"
    ]
    stopped = settings_of(tmp_path / "endless", tmp_path, stop=["."])
    assert check_tokens(stopped, read_model(stopped)) == []


@pytest.mark.parametrize(
    ("training", "generation", "stored", "named"),
    [
        ("bfloat16", "bfloat16", "float32", ["training.dtype", "generation.dtype"]),
        ("float32", "bfloat16", "float32", ["generation.dtype"]),
        ("float32", "auto", "bfloat16", ["generation.dtype"]),
        ("bfloat16", "auto", "float32", ["training.dtype"]),
        ("float32", "auto", "float32", []),
    ],
)
def test_bfloat16_on_a_processor_that_is_slow_in_it_is_noted_with_what_to_set(
    training: str,
    generation: str,
    stored: str,
    named: list[str],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "slow_bfloat16", lambda: "12.3 ms in bfloat16, 1.1 ms in float32")
    monkeypatch.setattr(preflight, "resolve_device", lambda _: torch.device("cpu"))
    settings = settings_of(model, tmp_path)
    sections = {"training": settings.training, "generation": settings.generation}
    dtypes = {"training": training, "generation": generation}
    asked = settings.model_copy(
        update={name: section.model_copy(update={"dtype": dtypes[name]}) for name, section in sections.items()}
    )
    facts = read_model(settings)
    facts.config.dtype = getattr(torch, stored)
    checks = check_precision(asked, facts)
    wanted = " and ".join(f'{key} = "float32"' for key in named)
    assert [check.detail for check in checks] == [f"12.3 ms in bfloat16, 1.1 ms in float32: set {wanted}"] * bool(named)
    assert all(check.state == "note" for check in checks)
    monkeypatch.setattr(preflight, "slow_bfloat16", lambda: None)
    assert check_precision(asked, facts) == []


def test_a_tokenizer_larger_than_the_model_is_noted_and_prompts_with_its_tokens_are_refused(
    model: Path, tmp_path: Path
) -> None:
    larger = shutil.copytree(model, tmp_path / "larger")
    tokenizer = load_tokenizer(str(larger))
    tokenizer.add_tokens(["&&"])
    largest = tokenizer.convert_tokens_to_ids("&&")
    tokenizer.save_pretrained(larger)
    settings = settings_of(larger, tmp_path)
    facts = read_model(settings)
    (note,) = check_tokens(settings, facts)
    assert note.state == "note"
    assert note.detail == (
        f"the tokenizer has token ids up to {largest}, the model up to 96: prompts with larger ones will be refused"
    )
    assert [check.state for check in lengths(settings, [prompt("short")])] == ["ok"]
    (fail,) = lengths(settings, [prompt("a&&b")])
    assert (fail.state, "1 token ids above the model's 97; p/4: expected token" in fail.detail) == ("fail", True)


def test_prompts_that_would_end_in_error_are_counted_and_the_longest_named(model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, tmp_path)
    assert [check.state for check in lengths(settings, [prompt("short")])] == ["ok"]
    _, check = lengths(settings, [prompt("short"), prompt("x" * 70), prompt("x" * 65)])
    assert check.state == "note"
    assert check.detail == (
        "2 of 3 prompts would be refused: 2 longer than 64 tokens; p/70: expected a prompt of 1 to 64 tokens, got 70; "
        "raise loop.max_prompt_length, or leave them out with data.filter"
    )
    (check,) = lengths(settings, [prompt("x" * 65), prompt("x" * 70)], total=500)
    assert (check.state, check.detail[:50]) == ("fail", "2 of 2 prompts (sampled from 500) would be refused")


def test_prompts_that_leave_too_little_room_for_a_completion_are_noted(model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, tmp_path, max_prompt_length=128)
    _, note = lengths(settings, [prompt("x" * 100)])
    assert (note.state, "only 28 of loop.max_completion_length = 32" in note.detail) == ("note", True)
    (fail,) = lengths(settings, [prompt("x" * 128)])
    assert "more positions" in fail.detail


def test_chats_need_a_chat_template(model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, tmp_path)
    chat = Prompt(prompt_id="p/1", dataset="p", content=(ChatTurn(role="user", content="hi"),))
    (fail,) = lengths(settings, [chat])
    assert (fail.state, "1 no chat template; p/1: expected a chat template in the" in fail.detail) == ("fail", True)


def test_a_missing_tokenizer_and_an_empty_one_give_different_messages(model: Path, tmp_path: Path) -> None:
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((model / file).read_bytes())
    settings = settings_of(tmp_path, tmp_path)
    with pytest.raises(ModelError, match="got a model without one"):
        read_tokenizer(settings)


@pytest.mark.processes
async def test_a_reward_that_pays_as_much_for_nothing_is_noted(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blind_reward.py").write_text("def blind(completions, answer, **kwargs):\n    return [1.0]\n")
    monkeypatch.chdir(tmp_path)
    given = settings_of(model, tmp_path)
    rewards = given.rewards.model_copy(update={"functions": ("blind_reward:blind", "exact_match")})
    settings = given.model_copy(update={"rewards": rewards})
    blind, exact = await check_rewards(
        settings, [Prompt(prompt_id="p/1", dataset="p", content="1+1=", columns={"answer": "2"})]
    )
    assert (blind.state, exact.state) == ("note", "ok")
    assert "blind gives 1 for a row's own answer, 1 for an empty completion (1 rows); it gives the same" in blind.detail


@pytest.mark.processes
async def test_a_reward_that_pays_an_empty_completion_like_the_answer_is_noted(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`zip` stops at the shorter text, so what is missing is no mistake; another row's answer gets less."""
    (tmp_path / "short_reward.py").write_text(
        "def few_mistakes(completions, answer, **kwargs):\n"
        "    return [1.0 - sum(a != b for a, b in zip(*pair)) / 2 for pair in zip(completions, answer)]\n"
    )
    monkeypatch.chdir(tmp_path)
    given = settings_of(model, tmp_path)
    settings = given.model_copy(
        update={"rewards": given.rewards.model_copy(update={"functions": ("short_reward:few_mistakes",)})}
    )
    (check,) = await check_rewards(settings, rows_with("84", "17", "95"))
    assert check.state == "note"
    assert check.detail.endswith("; on every row an empty completion gets as much as the answer; check the function")


def rows_with(*answers: Any) -> list[Prompt]:
    return [
        Prompt(prompt_id=f"p/{place}", dataset="p", content=f"{place}?", columns={"answer": answer})
        for place, answer in enumerate(answers, start=1)
    ]


@pytest.mark.processes
async def test_rows_are_paid_for_their_own_answer_and_for_another_rows_and_shown(model: Path, tmp_path: Path) -> None:
    settings, shown = settings_of(model, tmp_path), list[str]()
    (check,) = await check_rewards(
        settings, rows_with("84", " 7", "x", "84", 5, "6"), read_tokenizer(settings), shown.append
    )
    assert (check.state, check.detail) == (
        "ok",
        "exact_match gives 1 for a row's own answer, 0 for another row's, 0 for an empty completion (6 rows)",
    )
    assert len(shown) == 5
    assert shown[1] == "p/2  '2?'  answer ' 7'  paid for itself: exact_match 1"


@pytest.mark.processes
async def test_answers_that_no_completion_can_give_fail(model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, tmp_path)
    fail, changed = await check_rewards(settings, rows_with("½", "84", "⅓"), read_tokenizer(settings))
    assert (fail.state, changed.state) == ("fail", "note")
    assert "2 rows get 0 or None for their own answer, first p/1: 0 for ''" in fail.detail
    assert "2 of 3 answers changed by the tokenizer, first p/1: '½' becomes ''" in changed.detail
    _, nothing = await check_rewards(settings, rows_with("", None, "84"))
    assert (nothing.state, nothing.detail[:68]) == (
        "fail",
        "no function pays anything on 2 of 3 rows, first p/1 with answer ''; ",
    )


@pytest.mark.processes
@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (("B", "C", "A"), "math_verify fails on 3 of 3 rows (100%), first on p/1: AnswerRefused: expected mathematics"),
        (({"target": 24, "numbers": [4, 6]},) * 2, "got a mapping with 'target', 'numbers'; set data.answer_column"),
        ((True, "7"), "math_verify fails on 1 of 2 rows (50%), first on p/1: ValueError: expected text, a number"),
    ],
)
async def test_answers_that_are_no_mathematics_fail_at_the_start(
    model: Path, tmp_path: Path, answers: tuple[Any, ...], reason: str
) -> None:
    given = settings_of(model, tmp_path)
    rewards = given.rewards.model_copy(update={"functions": ("math_verify",)})
    checks = await check_rewards(given.model_copy(update={"rewards": rewards}), rows_with(*answers))
    assert checks[0].state == "fail"
    assert reason in checks[0].detail


@pytest.mark.processes
async def test_a_stop_string_that_cuts_an_answer_off_is_seen(model: Path, tmp_path: Path) -> None:
    pattern = {"functions": ("exact_match", "format"), "answer_pattern": "<answer>(.*?)</answer>"}
    for stop, paid in ((["</answer>"], "0"), (["<end>"], "1")):
        given = settings_of(model, tmp_path, stop=stop)
        rewards = given.rewards.model_copy(update=pattern | {"format_pattern": "<answer>.*"})
        settings = given.model_copy(update={"rewards": rewards})
        exact, form, *_ = await check_rewards(settings, rows_with("84", "7"), read_tokenizer(settings))
        assert exact.detail.startswith(f"exact_match gives {paid} for a row's own answer, 0 for another row's")
        assert form.detail.startswith("format gives 1 for a row's own answer, 1 for another row's, 0 for an empty")


def test_prompts_that_the_tokenizer_changes_are_noted(model: Path, tmp_path: Path) -> None:
    tokenizer = read_tokenizer(settings_of(model, tmp_path))
    assert check_rendering(tokenizer, [prompt("1+1="), prompt("x")]) == []
    (note,) = check_rendering(tokenizer, [prompt("1+1="), prompt("½ of 7")])
    assert note.state == "note"
    assert note.detail.startswith("1 of 2 prompts are changed by the tokenizer or its chat template, first p/6: '½ of")


def test_a_pattern_that_asks_for_the_end_of_the_prompt_is_noted(model: Path, tmp_path: Path) -> None:
    given = settings_of(model, tmp_path)
    tokenizer = read_tokenizer(given)
    for functions, pattern, asked in (
        (("exact_match", "format"), None, ["format_pattern"]),
        (("exact_match",), "<think>.*</think>(.*)", ["answer_pattern"]),
        (("exact_match",), "<answer>(.*)</answer>", []),
    ):
        rewards = given.rewards.model_copy(update={"functions": functions, "answer_pattern": pattern})
        settings = given.model_copy(update={"rewards": rewards})
        found = [check.detail for check in check_opening(settings, tokenizer, [prompt("3+4=<think>")])]
        assert found == [
            "p/11 ends with <think>, so a completion does not start with it, but rewards."
            f"{name} asks for it: leave <think> out of the pattern"
            for name in asked
        ]
        assert check_opening(settings, tokenizer, [prompt("3+4=")]) == []


@pytest.mark.processes
async def test_answers_that_are_whole_solutions_are_noted(model: Path, tmp_path: Path) -> None:
    rows = rows_with("48/2=24\n#### 72", "7", "He has 5. #### 5")
    (check,) = await check_rewards(settings_of(model, tmp_path), rows)
    assert check.state == "note"
    assert "2 answers are whole solutions, which no completion will equal, first p/1: '48/2=24" in check.detail


@pytest.mark.processes
async def test_answers_that_a_library_wrote_for_other_values_are_noted(model: Path, tmp_path: Path) -> None:
    forms = (
        "['4', 'four']",
        "84.0",
        "{'a': 1}",
        "nan",
        "b'84'",
        '="007"',
        "array([4, 5])",
        "np.int64(8)",
        '["1", null]',
    )
    texts = ("7", "[1, 2]", "[x]", "4.00", "b", "{1, 2}", "(1, 2)", "N/A")
    _, *notes = await check_rewards(settings_of(model, tmp_path), rows_with(*forms, *texts, ["a", "b"], 5))
    assert {note.state for note in notes} == {"note"}
    found = [note.detail.partition(", first")[0].partition(" answers are written as ")[::2] for note in notes]
    assert found == [
        ("2 of 19", "a list"),
        ("1 of 19", "a whole number with a decimal point, as beside blanks"),
        ("1 of 19", "a mapping"),
        ("1 of 19", "a missing value"),
        ("1 of 19", "bytes of Python"),
        ("1 of 19", "a formula of a spreadsheet"),
        ("2 of 19", "an object of Python"),
    ]
    assert "first p/1: \"['4', 'four']\"; rewards get the text" in notes[0].detail


@pytest.mark.processes
@pytest.mark.parametrize(
    ("function", "notes"),
    [
        (
            "math_verify",
            [
                "3 answers have a unit that is not compared, so that any other is right, first p/1: '5 km'",
                "2 answers have letters after the number that are taken for factors, without which a completion gets "
                "0, first p/4: '9 km/h'",
            ],
        ),
        ("exact_match", ["5 answers have a unit, without which a completion gets 0, first p/1: '5 km'"]),
    ],
)
async def test_units_of_answers_are_noted_with_what_a_reward_makes_of_them(
    function: str, notes: list[str], model: Path, tmp_path: Path
) -> None:
    given = settings_of(model, tmp_path)
    settings = given.model_copy(update={"rewards": given.rewards.model_copy(update={"functions": (function,)})})
    rows = rows_with("5 km", "6\\text{ cm}", "$7", "9 km/h", "8 N", "2x+1", "50%", "5t")
    (check,) = await check_rewards(settings, rows)
    assert check.state == "note"
    assert check.detail.split("; ")[1:] == notes


def test_columns_that_the_model_does_not_see_are_noted() -> None:
    shown, blank = ({"images": value, "answer": "7"} for value in (["a.png"], []))
    rows = [Prompt(prompt_id=f"p/{place}", dataset="p", content="x", columns=row) for place, row in enumerate((blank,))]
    assert check_prompts(rows, 9).state == "ok"
    rows.append(rows[0].model_copy(update={"columns": shown}))
    note = check_prompts(rows, 9, ["1 of 10 rows are left out"])
    assert note.state == "note"
    assert note.detail.startswith("9 prompts; 1 of 10 rows are left out; the model sees text alone, and nothing of col")


def test_a_step_that_takes_more_prompts_than_there_are_is_noted(model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, tmp_path, groups_per_step=8)
    assert check_amount(settings, 8) == []
    (note,) = check_amount(settings, 7)
    assert note.detail.startswith(
        "a step takes 8 prompts, the data has 7: each step has the same prompts several times"
    )


def test_a_tokenizer_with_a_shorter_context_than_the_run_uses_is_noted(model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, tmp_path)
    tokenizer, facts = read_tokenizer(settings), read_model(settings)
    assert check_context(settings, tokenizer, facts) == []
    tokenizer.transformers_tokenizer.model_max_length = 64
    (note,) = check_context(settings, tokenizer, facts)
    assert "the tokenizer's context is 64 tokens, prompt and completion may have 96" in note.detail


@pytest.mark.processes
async def test_a_reward_that_fails_on_some_rows_is_reported_with_their_share(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "frail_reward.py").write_text(
        "def frail(completions, n, **kwargs):\n"
        "    if n[0] % 10 == 9:\n        raise KeyError('nine')\n"
        "    return [float(len(completions[0]))]\n"
        "def frailer(completions, n, **kwargs):\n    return [1.0 / (n[0] % 2)]\n"
    )
    monkeypatch.chdir(tmp_path)
    given = settings_of(model, tmp_path)
    names = ("frail_reward:frail", "frail_reward:frailer")
    settings = given.model_copy(update={"rewards": given.rewards.model_copy(update={"functions": names})})
    rows = [Prompt(prompt_id=f"p/{n}", dataset="p", content="?", columns={"n": n}) for n in range(40)]
    frail, frailer = await check_rewards(settings, rows)
    assert frail.state == "note"
    assert frail.detail.startswith("frail fails on 4 of 40 rows (10%), first on p/9: KeyError: 'nine'")
    assert frailer.state == "fail"
    assert frailer.detail.startswith("frailer fails on 20 of 40 rows (50%), first on p/0: ZeroDivisionError")


@pytest.mark.processes
async def test_a_reward_that_fails_where_only_a_row_without_an_answer_meets_a_completion_is_seen(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "digits_reward.py").write_text(
        "def digits(completions, answer, **kwargs):\n"
        "    said = ''.join(c for c in completions[0] if c.isdigit())\n"
        "    return [float(len(said) == len(answer[0])) if said else 0.0]\n"
    )
    monkeypatch.chdir(tmp_path)
    given = settings_of(model, tmp_path)
    settings = given.model_copy(
        update={"rewards": given.rewards.model_copy(update={"functions": ("digits_reward:digits", "exact_match")})}
    )
    digits, match = await check_rewards(settings, rows_with("84", "7", None))
    assert (digits.state, digits.detail[:57]) == ("note", "digits fails on 1 of 3 rows (33%), first on p/3: TypeErro")
    assert match.detail.startswith("exact_match gives 0.667 for a row's own answer, 0 for another row's")


def test_missing_trackers_are_named(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "trackio" else find(name))
    with pytest.raises(SettingsError, match=r"the package trackio for tracking.to.*pip install trackio"):
        check_installed(TrackingSettings(to=("tensorboard", "trackio")))
    check_installed(TrackingSettings(to=("tensorboard",)))


def test_directories_are_tried_and_left_as_they_were(model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, tmp_path / "runs")
    assert [check.state for check in check_storage(settings, 1000)] == ["ok", "ok"]
    assert not [*tmp_path.iterdir()]
    (tmp_path / "runs/tried/checkpoints/step_7").mkdir(parents=True)
    assert check_storage(settings, 1000)[0].detail.endswith("up to step 7; the run would continue from there")
    (tmp_path / "runs/tried/checkpoints/step_1000").mkdir()
    assert check_storage(settings, 1000)[0].detail.endswith(
        "up to step 1000; that is the last step, nothing would be trained"
    )
    assert check_storage(settings, 1 << 50)[1].state == "fail"
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="expected to write into"):
        check_storage(settings_of(model, tmp_path / "file"), 0)


def test_the_last_line_names_what_is_worth_a_look() -> None:
    fine, note, fail = Check("data", "ok", ""), Check("rewards", "note", ""), Check("model", "fail", "")
    assert closing_line([fine, fine]) == "2 checks: 2 ok; nothing was started"
    assert closing_line([fine] * 8 + [note]) == "9 checks: 8 ok, 1 note (rewards); nothing was started"
    assert closing_line([fine, note, note, fail]) == (
        "4 checks: 1 ok, 2 notes (rewards), 1 failed (model); nothing was started"
    )


@pytest.mark.processes
def test_a_sound_task_passes_every_check(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    assert dry_run(settings_of(model, tmp_path / "runs", groups_per_step=1), lines.append) == 0, lines
    assert "ok    rewards      exact_match gives 1 for a row's own answer, 0 for an empty completion (1 rows)" in lines
    assert "      p/1  '1+1='  answer '2'  paid for itself: exact_match 1" in lines
    assert lines[-1] in (
        "10 checks: 10 ok; nothing was started",
        "10 checks: 9 ok, 1 note (broker); nothing was started",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]
