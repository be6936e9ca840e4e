import re
from pathlib import Path
from typing import Any

import pytest

from streamrl.schemas.errors import SettingsError
from streamrl.schemas.secrets import MASK
from streamrl.settings.explaining import explain
from streamrl.settings.features import features
from streamrl.settings.keys import IN_OTHER_LIBRARIES, REMOVED, RENAMED, WITHOUT_COUNTERPART, known_keys, suggestion
from streamrl.settings.loading import as_toml, load_settings, validated
from streamrl.settings.tree import Settings

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "benchmarks" / "pipeline" / "example.toml"
DATA = {"data": {"dataset": "chain_sum"}}
EMULATED = DATA | {"generation": {"engine": "emulated"}, "training": {"backend": "emulated"}}


def test_an_emulated_run_needs_no_model() -> None:
    assert validated(EMULATED).model.path == ""
    assert load_settings(EXAMPLE, ["--emulation.lengths.source=histogram"]).emulation.lengths.source == "histogram"


@pytest.mark.parametrize("training", [{}, {"training": {"backend": "torch"}, "generation": {"engine": "emulated"}}])
def test_a_model_is_asked_for_where_one_is_trained(training: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"expected a value for model\.path"):
        validated(DATA | training)


def test_no_evaluation_is_none_and_an_empty_name_is_refused_before_anything_starts() -> None:
    assert load_settings(EXAMPLE, ["--evaluation.function=none"]).evaluation.function is None
    with pytest.raises(SettingsError, match=r"^setting evaluation\.function: .*got ''"):
        load_settings(EXAMPLE, ["--evaluation.function="])


def test_an_emulated_trainer_exports_nothing_that_a_real_engine_could_run() -> None:
    with pytest.raises(SettingsError, match=r'expected generation\.engine = "emulated".*got "transformers"'):
        validated(DATA | {"training": {"backend": "emulated"}})


def test_constant_rewards_and_dynamic_sampling_contradict_each_other() -> None:
    with pytest.raises(SettingsError, match=r"every group would be skipped"):
        validated(EMULATED | {"algorithm": {"dynamic_sampling": True}})


def test_a_wrong_key_in_a_section_of_a_section_is_named_with_its_nearest() -> None:
    with pytest.raises(SettingsError, match=r"did you mean emulation\.decode\.batch_scale\?"):
        load_settings(EXAMPLE, ["--emulation.decode.batch_scal=3"])


def test_a_wrong_field_of_a_table_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(EXAMPLE.read_text().replace("step_s = 0.01\n", "step_s = -1\n"))
    line = path.read_text().splitlines().index("step_s = -1") + 1
    with pytest.raises(SettingsError, match=rf"^setting emulation\.decode\.step_s: .*config\.toml, line {line}\)"):
        load_settings(path, [])
    assert load_settings(path, ["--emulation.decode.step_s=0.5"]).emulation.decode.step_s == 0.5


def test_resolved_settings_read_back_equal(tmp_path: Path) -> None:
    settings = load_settings(EXAMPLE, ["--emulation.decode.table=[[1, 0.01], [8, 0.02]]"])
    path = tmp_path / "config.toml"
    path.write_text(as_toml(settings))
    assert isinstance(settings, Settings)
    assert load_settings(path, []) == settings


def test_no_secret_is_written() -> None:
    arguments = ["--kafka.sasl_plain_username=me", "--kafka.sasl_plain_password=canary-4711"]
    arguments += ["--kafka.security_protocol=SASL_PLAINTEXT", "--kafka.sasl_mechanism=PLAIN"]
    text = as_toml(load_settings(EXAMPLE, arguments))
    assert f'sasl_plain_password = "{MASK}"' in text
    assert "canary" not in text


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_renamed_key_is_refused_with_its_new_name(old: str, new: str) -> None:
    section, _, key = old.partition(".")
    given = f"--{section}.{key or 'max_group_wait_s'}=1"
    with pytest.raises(SettingsError, match=rf"^setting {re.escape(old)} .*is now {re.escape(new)}$"):
        load_settings(EXAMPLE, [given])
    with pytest.raises(SettingsError, match=rf"is now {re.escape(new)}$"):
        explain(old)
    assert new in {*known_keys(), *Settings.model_fields}


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("training.save_steps", "did you mean training.checkpoint_every?"),
        ("training.gradient_accumulation_steps", "did you mean batching.token_budget"),
        ("training.ppo_epochs", "did you mean algorithm.num_iterations?"),
        ("loop.max_tokens", "did you mean loop.max_completion_length?"),
        ("loop.rollouts_per_example", "did you mean loop.num_generations?"),
        ("model.name", "did you mean model.path?"),
        ("training.per_device_train_batch_size", "did you mean loop.groups_per_step (prompts per step"),
        ("training.report_to", "did you mean tracking.to?"),
        ("training.bf16", "did you mean training.dtype"),
        ("generation.name", "; known ones are adopt, data_parallel_size"),
        ("orchestrator.x", "docs/moving.md lists the counterparts of prime-rl's settings"),
    ],
)
def test_a_name_of_another_library_is_answered_with_ours(given: str, hint: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(hint)):
        load_settings(EXAMPLE, [f"--{given}=1"])


def test_names_of_other_libraries_lead_to_settings_that_there_are() -> None:
    keys = {*known_keys()}
    suggested = {right.partition(" (")[0] for right in IN_OTHER_LIBRARIES.values()}
    absent = {key for right in suggested for key in right.split(" and ")} - keys
    there = {feature.name for feature in features()}
    assert not {key for key in absent if key.partition(".")[0] in there or "." not in key}
    # These two names are settings of emulated lengths and of a teacher. Other libraries use them for something else.
    ours = {key.rpartition(".")[2] for key in keys} - {"max_tokens", "kl_coef"}
    assert not ours & {*IN_OTHER_LIBRARIES, *WITHOUT_COUNTERPART}


def test_an_error_names_the_settings_that_the_manual_gives_for_another_library() -> None:
    """Each row of a table there: names of the other library, and names here; a name may stand with its value."""
    rows = re.findall(r"^\| (`.*`.*) \| (.*`.*) \|$", (ROOT / "docs" / "moving.md").read_text(), re.MULTILINE)
    assert len(rows) > 40
    # A name in sections of both libraries, a value, two functions, and one of whose values is an algorithm here.
    others = {"rollout.name", "reinforce", "load_problems", "generate_rollout", "loss_type"}
    for theirs, ours in rows:
        names = re.findall(r"`([a-z][a-z0-9_.]*)(?:=[^`]*)?`", re.sub(r"= `.*", "", theirs))
        known = re.findall(r"`\[?([a-z_]+\.[a-z_]+(?:\.[a-z_]+)?)", ours)
        for name in {*names} - others - WITHOUT_COUNTERPART.keys() if known else ():
            hint = suggestion(("training", name.rpartition(".")[2]))
            assert any(key in hint for key in known), (name, hint)


@pytest.mark.parametrize(("old", "instead"), REMOVED.items())
def test_a_removed_key_is_refused_with_what_holds_instead(old: str, instead: str) -> None:
    key = old if "." in old else f"{old}.key"  # a removed section
    with pytest.raises(
        SettingsError, match=rf"^setting {re.escape(old)} .*was removed: {re.escape(instead)}; remove it$"
    ):
        load_settings(EXAMPLE, [f"--{key}=1"])
    with pytest.raises(SettingsError, match=rf"was removed: {re.escape(instead)}$"):
        explain(key)
    assert key not in known_keys()
