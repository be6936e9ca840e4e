from pathlib import Path

import pytest

from streamrl.schemas.errors import SettingsError
from streamrl.schemas.trajectories import SamplingParams
from streamrl.settings.contradictions import RULES
from streamrl.settings.keys import known_keys
from streamrl.settings.loading import as_toml, load_settings

EXAMPLE = Path(__file__).parents[2] / "benchmarks" / "pipeline" / "example.toml"
BASE = '[model]\npath = "m"\n[data]\npath = "p.jsonl"\n'


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "a.toml"
    path.write_text(text)
    return path


def test_derived_settings_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, BASE + '[loop]\nmode = "synchronous"\nmax_staleness = 2\n')
    with pytest.raises(SettingsError, match=r'no loop\.max_staleness with loop\.mode = "synchronous".*a\.toml, line 7'):
        load_settings(path, [])


@pytest.mark.parametrize("adopt", ["in_flight", "recompute"])
def test_a_repack_needs_workers_that_wait_for_it(tmp_path: Path, adopt: str) -> None:
    durable = ["--generation.partial_trajectories=durable", "--dispatch.repack=true"]
    with pytest.raises(
        SettingsError, match=rf'no dispatch\.repack with .*adopt = "{adopt}" \(durable and idle'
    ) as caught:
        load_settings(write(tmp_path, BASE + f'[generation]\nadopt = "{adopt}"\n'), durable)
    assert "\n" not in str(caught.value)
    assert load_settings(write(tmp_path, BASE + '[generation]\nadopt = "idle"\n'), durable).dispatch.repack


def test_flash_attention_takes_no_float32(tmp_path: Path) -> None:
    flash = ["--training.attn_implementation=flash_attention_2"]
    with pytest.raises(SettingsError, match=r'no training\.attn_implementation with training\.dtype = "float32"'):
        load_settings(write(tmp_path, BASE), flash)
    settings = load_settings(write(tmp_path, BASE), [*flash, "--training.dtype=bfloat16"])
    assert settings.training.attn_implementation == "flash_attention_2"


def test_a_later_layers_decision_replaces_what_an_earlier_one_said(tmp_path: Path) -> None:
    path = write(tmp_path, BASE + "[loop]\nmax_staleness = 2\n")
    settings = load_settings(path, ["--loop.mode", "stream"])
    assert settings.loop.staleness_bound == 0
    with pytest.raises(SettingsError, match=r"--loop\.max_staleness"):
        load_settings(path, ["--loop.mode", "stream", "--loop.max_staleness=1"])


def test_sampling_settings_reach_the_orders_from_file_and_command_line(tmp_path: Path) -> None:
    sections = '[data.chat_template_kwargs]\nenable_thinking = false\n[loop]\nstop = ["</a>", "\\n"]\nmin_p = 0.1\n'
    arguments = ["--loop.include_stop_str_in_output=true", "--data.chat_template_kwargs.level", "3"]
    settings = load_settings(write(tmp_path, BASE + sections), arguments)
    assert settings.data.chat_template_kwargs == {"enable_thinking": False, "level": 3}
    assert settings.loop.sampling_params(7) == SamplingParams(
        max_completion_length=1024, min_p=0.1, stop=("</a>", "\n"), include_stop_str_in_output=True, seed=7
    )
    again = load_settings(write(tmp_path, as_toml(settings)), [])
    assert (again.loop, again.data) == (settings.loop, settings.data)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--loop.mode=synchronous --ingest.sampling=freshest", r'no ingest\.sampling with loop\.mode = "synchronous"'),
        ("--loop.mode=one_step_async --ingest.sampling=oldest", None),
        ("--ingest.sampling=capped", r"setting ingest: ingest\.staleness_cap must be set"),
        ("--ingest.sampling=capped --ingest.staleness_cap=4", r"staleness bound of 4 \(capped and a larger bound"),
        ("--ingest.sampling=capped --ingest.staleness_cap=3", None),
        ("--ingest.staleness_cap=1", r'no ingest\.staleness_cap with ingest\.sampling = "oldest"'),
        (
            "--ingest.passed_over=skip",
            r'no ingest\.passed_over with ingest\.sampling = "oldest", which passes over no group',
        ),
        ("--ingest.sampling=a:b --ingest.passed_over=skip", None),
        ("--ingest.sampling=newest", r"expected one of oldest, freshest, .* or package\.module:function, got 'newest'"),
    ],
)
def test_an_order_of_taking_groups_needs_groups_to_choose_from(
    tmp_path: Path, arguments: str, message: str | None
) -> None:
    path = write(tmp_path, BASE)
    if message is None:
        again = write(tmp_path, as_toml(load_settings(path, arguments.split())))
        assert load_settings(again, []).ingest == load_settings(write(tmp_path, BASE), arguments.split()).ingest
    else:
        with pytest.raises(SettingsError, match=message) as caught:
            load_settings(path, arguments.split())
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--loop.include_stop_str_in_output=true", r"no loop\.include_stop_str_in_output with no loop\.stop"),
        ("--loop.stop=</a>", r"setting loop\.stop: expected a list such as '\[\"</a>\"\]', got '</a>'"),
        ('--loop.stop=[""]', r"setting loop\.stop\.0: string should have at least 1 character"),
        ("--loop.min_p=1.5", r"setting loop\.min_p: .*less than or equal to 1"),
    ],
)
def test_wrong_sampling_settings_are_one_line(tmp_path: Path, argument: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        load_settings(write(tmp_path, BASE), [argument])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--algorithm.critic.lam=0.9"], r'no algorithm\.critic\.lam with algorithm\.name = "grpo"'),
        (["--algorithm.name=reinforce_plus_plus", "--algorithm.critic.lam=0.9"], r"no algorithm\.critic\.lam"),
        (["--algorithm.name=ppo", "--algorithm.teacher.path=t"], r"no algorithm\.teacher\.path"),
        (["--algorithm.options.tau=1"], r'no algorithm\.options with algorithm\.name = "grpo", which has none'),
        (["--algorithm.gae_lambda=0.9"], r"did you mean algorithm\.critic\.lam\?"),
        (["--algorithm.learning_rate=0.9"], r"did you mean training\.learning_rate\?"),
        (["--algorithm.name=dpo", "--generation.engine=emulated"], r'got algorithm\.name = "dpo"'),
        (["--loop.num_generations=1"], r"expected loop\.num_generations >= 2"),
        (["--loop.top_k=1"], r"expected loop\.top_k above 1"),
    ],
)
def test_settings_of_other_algorithms_are_refused_in_one_line(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        load_settings(write(tmp_path, BASE), arguments)
    assert "\n" not in str(caught.value)


def test_an_algorithm_is_chosen_with_its_own_section(tmp_path: Path) -> None:
    text = BASE + '[loop]\nnum_generations = 1\n[algorithm]\nname = "ppo"\n[algorithm.critic]\nlam = 0.9\n'
    settings = load_settings(write(tmp_path, text), [])
    assert (settings.algorithm.critic.lam, settings.algorithm.whitens_advantages) == (0.9, True)
    assert load_settings(write(tmp_path, as_toml(settings)), []) == settings


def test_settings_without_effect_are_not_written(tmp_path: Path) -> None:
    path = write(tmp_path, BASE + "[loop]\nmax_staleness = 2\n")
    text = as_toml(load_settings(path, ["--loop.mode", "stream"]))
    assert "max_staleness" not in text
    assert "format_pattern" not in text
    again = write(tmp_path, text)
    assert as_toml(load_settings(again, [])) == text


def test_a_default_of_ours_is_no_contradiction_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = {"model": {"path": "m"}, "data": {"dataset": "gcd"}, "loop": {"max_staleness": 3}}
    assert load_settings(None, ["--loop.mode=synchronous"], defaults).loop.mode == "synchronous"


def test_every_rule_names_settings_that_exist() -> None:
    keys = set(known_keys())
    assert {key for rule in RULES for key in (*rule.keys, *rule.deciders)} <= keys


def test_the_example_contradicts_nothing() -> None:
    load_settings(EXAMPLE, [])
