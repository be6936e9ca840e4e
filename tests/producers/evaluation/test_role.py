from pathlib import Path

import pytest

from streamrl.producers.evaluation.settings import HeldOutSettings
from streamrl.producers.grading.settings import GradedRewards
from streamrl.schemas.errors import SettingsError
from streamrl.settings.features import awaited, features
from streamrl.settings.loading import as_toml, load_settings


def test_held_out_prompts_and_graders_are_refused_together() -> None:
    graded = [
        *("--data.dataset=chain_sum", "--model.path=m"),
        *('--rewards.functions=["exact_match"]', '--rewards.graded=["exact_match"]'),
    ]
    assert load_settings(None, graded).section(GradedRewards).graded
    with pytest.raises(SettingsError, match="only workers score held-out completions"):
        load_settings(None, [*graded, "--evaluation.data.held_out.dataset=chain_sum"])


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
bare = { path = "bare.jsonl", system_prompt = "none", answer_column = "none", chat_template_kwargs = {} }
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
    assert [bool(one.chat_template_kwargs) for one in sets.values()] == [True, True, False, True]
    # The processes of a run read the resolved settings, in which nothing is left to take over.
    config.write_text(as_toml(settings))
    assert load_settings(config, []) == settings
    assert load_settings(config, ["--data.system_prompt=Else."]).section(HeldOutSettings).data == sets


def test_an_interval_of_0_turns_the_evaluation_off() -> None:
    options = ["--data.dataset=chain_sum", "--model.path=m", "--evaluation.data.held_out.dataset=gcd"]
    settings = load_settings(None, [*options, "--evaluation.every=0"])
    assert "evaluator" not in [child.name for feature in features() for child in feature.processes.started(settings)]
    assert awaited(settings) is None
    assert awaited(load_settings(None, options)) is not None
