import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
from click import UsageError
from typer.testing import CliRunner

from docs.generate import PAGES as GENERATED
from docs.generate import commands_page, settings_page, topics_page
from streamrl.cli.app import app
from streamrl.producers.gateway.role_commands import RoleGroup
from streamrl.schemas.topics import CATALOGUE
from streamrl.settings.keys import known_keys
from streamrl.settings.tree import Settings
from tests.chaos.faults.schedule import BY_NAME, FAULTS
from tests.deploy.compose.stack import FILE, services
from tests.docs.pages import DOCS, PAGES, READ_FIRST, ROOT, anchors, commands, links, settings
from tests.faults.catalogue import CASES
from tests.simulation.worlds.scenarios import SCENARIOS

CAMPAIGNS: Mapping[str, Collection[str]] = {"chaos": BY_NAME, "simulation": SCENARIOS}


@pytest.mark.parametrize("name", GENERATED)
def test_the_generated_pages_are_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text() == GENERATED[name](), "run python -m docs.generate"


def test_every_setting_and_every_topic_has_its_place() -> None:
    assert settings_page().count("\n| `") == len(list(known_keys()))
    assert all(f"\n| `{topic.name}` |" in topics_page() for topic in CATALOGUE)


def test_every_command_is_in_the_reference_and_its_help_fits_its_line() -> None:
    page = commands_page()
    for words in _commands(typer.main.get_command(app)):
        assert f"## `streamrl {' '.join(words)}`" in page
        # A terminal of 80 columns: click leaves two of them free.
        help_text = CliRunner().invoke(app, [*words[:-1], "--help"], terminal_width=78).output
        assert re.search(rf"^  {re.escape(words[-1])} .*\.$", help_text, re.MULTILINE), words
        assert f"  {words[-1]} " in help_text
        assert not re.search(rf"^  {re.escape(words[-1])} .*\.\.\.$", help_text, re.MULTILINE), words


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, inner in getattr(command, "commands", {}).items():
        yield (*path, name)
        yield from _commands(inner, (*path, name))


def test_tables_have_as_many_cells_in_each_row() -> None:
    for page in (settings_page(), topics_page()):
        for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
            counts = {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
            assert len(counts) == 1, table.splitlines()[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for path, anchor in links(page):
        assert "://" not in path, path
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


@pytest.mark.parametrize("page", PAGES + READ_FIRST, ids=lambda page: page.name)
def test_every_command_of_a_page_exists_and_takes_its_options(page: Path) -> None:
    for words in commands(page):
        assert _is_there(words), f"streamrl {' '.join(words)}"


def _is_there(words: list[str]) -> bool:
    command: Any = typer.main.get_command(app)
    rest = list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    if hasattr(command, "commands") and (not rest or rest[0] == "[OPTIONS]"):
        return True  # the group as a whole, and the reference's line on how to use it
    if isinstance(command, RoleGroup):
        command = command.commands["serve"]
    if hasattr(command, "commands"):
        return False
    options = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    if not {word.split("=")[0] for word in rest if word.startswith("--") and "." not in word} <= options:
        return False
    context = command.context_class(command, **command.context_settings)
    return context.allow_extra_args or not _surplus(command.make_parser(context), rest)


def _surplus(parser: Any, words: list[str]) -> list[str]:
    """Arguments that the command does not take. A page may leave out required ones, and an option's value."""
    try:
        surplus: list[str] = parser.parse_args(shlex.split(" ".join(words).replace("[OPTIONS]", "")))[1]
    except UsageError:
        return []
    return surplus


def test_commands_are_read_one_by_one(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`streamrl topics apply|dif` and `streamrl run x; streamrl nope`\n"
        "```python\nfrom streamrl import Run\n```\n```bash\nstreamrl runs ls --jsn | jq .  # streamrl no\n```\n"
    )
    found = commands(page)
    assert found == [["runs", "ls", "--jsn"], ["topics", "apply"], ["topics", "dif"], ["run", "x"], ["nope"]]
    assert [words for words in found if _is_there(words)] == [["topics", "apply"], ["run", "x"]]
    assert not _is_there(["audit", "x"]), "a run is named by --run"


@pytest.mark.parametrize("page", PAGES + READ_FIRST, ids=lambda page: page.name)
def test_every_setting_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    if page.name == "moving.md":  # what others call it stands in the first column
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    named = {key for key in settings(text) if key.split(".")[0] in Settings.model_fields}
    known = {*known_keys(in_tables=True)}
    known |= {key.rpartition(".")[0] for key in known}
    assert named <= known, sorted(named - known)


def test_the_runbook_knows_every_alert() -> None:
    alerts = set(re.findall(r"- alert: (\w+)", (ROOT / "deploy" / "grafana" / "alerts.yaml").read_text()))
    assert alerts == set(re.findall(r"`(StreamRL\w+)`", (DOCS / "operations.md").read_text()))


def test_operations_name_the_profiles_and_variables_of_the_compose_file() -> None:
    text = (DOCS / "operations.md").read_text()
    profiles = {profile for service in services().values() for profile in service.get("profiles", [])}
    variables = set(re.findall(r"\$\{(\w+)", FILE.read_text()))
    assert all(f"| `{profile}` |" in text for profile in profiles)
    assert all(f"`{variable}`" in text for variable in variables)


def test_a_guide_that_names_what_is_not_there_is_found() -> None:
    text = "`loop.max_stalenes` and `--run.sed 1`\n```toml\n[training]\nlr = 1\n```\n"
    assert settings(text) - set(known_keys()) == {"loop.max_stalenes", "run.sed", "training.lr"}


ZENSICAL = Path(sys.executable).parent / "zensical"


@pytest.mark.processes
@pytest.mark.skipif(not ZENSICAL.exists(), reason="the manual's builder, which make check installs, and runs this with")
def test_every_page_is_in_the_site_and_no_link_of_it_is_broken(tmp_path: Path) -> None:
    """The site is built from a copy, because builds share a cache and a folder."""
    config = (ROOT / "zensical.toml").read_text()
    assert all(f'"{page.name}"' in config for page in PAGES)
    (tmp_path / "zensical.toml").write_text(config)
    shutil.copytree(DOCS, tmp_path / "docs")
    done = subprocess.run(
        [ZENSICAL, "build", "--strict"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "build" / "docs" / "concepts.html").is_file()
    assert not _addresses(tmp_path / "build" / "docs" / "index.html")


def _addresses(page: Path) -> str:
    """What a page would fetch from elsewhere."""
    found = re.findall(r'(?:src|href)="(https?://[^"]*)', page.read_text())
    return " ".join(address for address in found if "zensical.org" not in address)


def test_every_test_that_the_catalogue_of_faults_names_exists() -> None:
    for case in CASES:
        for named in case.tests:
            path, _, function = named.partition("::")
            campaign, _, name = named.partition(":")
            if campaign in CAMPAIGNS:
                assert name in CAMPAIGNS[campaign], f"{case.id}: {named}"
            else:
                text = (ROOT / "tests" / path).read_text()
                assert not function or re.search(rf"\bdef {function}\b", text), f"{case.id}: {named}"


def test_every_fault_of_a_chaos_run_is_in_the_catalogue() -> None:
    named = {name for case in CASES for name in case.tests}
    assert not [fault.name for fault in FAULTS if f"chaos:{fault.name}" not in named]


KILOBYTES = {
    "README.md": 9,
    "CONTRIBUTING.md": 5,
    "docs/algorithms.md": 6,
    "docs/architecture.md": 24.9,
    "docs/bad-reward.md": 4.1,
    "docs/code-map.md": 10.5,
    "docs/concepts.md": 9,
    "docs/emulation.md": 9,
    "docs/environments.md": 4.6,
    "docs/gateway.md": 8,
    "docs/gpu.md": 5.6,
    "docs/graders.md": 3.5,
    "docs/index.md": 3,
    "docs/instances.md": 9,
    "docs/learning-curves.md": 3.5,
    "docs/moving.md": 6,
    "docs/operations.md": 24.3,
    "docs/own-reward.md": 4.2,
    "docs/own-task.md": 7.9,
    "docs/python.md": 4.1,
    "docs/quickstart.md": 4,
    "docs/reliability.md": 15,
    "docs/reports.md": 2.8,
}
"""The most that a page may have, so that each is read in one sitting."""


@pytest.mark.parametrize("page", KILOBYTES)
def test_a_page_can_be_read_in_one_sitting(page: str) -> None:
    assert (ROOT / page).stat().st_size <= KILOBYTES[page] * 1000


@pytest.mark.parametrize("page", KILOBYTES)
def test_a_table_has_at_most_five_columns(page: str) -> None:
    rules = re.findall(r"^\|(?:[ :-]+\|)+$", (ROOT / page).read_text(), re.MULTILINE)
    assert all(rule.count("|") <= 6 for rule in rules)
