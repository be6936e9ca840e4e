"""The generated pages of what is promised and tested: invariants, faults, and the figures of a run."""

from collections.abc import Iterable, Iterator
from itertools import groupby

from docs.tables import code, plain, prose, table
from streamrl.observability.run_state.figures import LIVE
from tests.architecture.invariants import Invariant, invariants, named_tests
from tests.chaos.crashing.commit import POINTS_OF_RANKS
from tests.chaos.crashing.elsewhere import ALL as POINTS_ELSEWHERE
from tests.chaos.faults.schedule import FAULTS
from tests.faults.catalogue import CASES, SECTIONS, Case
from tests.mutants.catalogue import MUTANTS
from tests.simulation.worlds.scenarios import SCENARIOS

INVARIANTS_HEAD = """# Invariants

<!-- Written by `python -m docs.generate` from docstrings and tests; do not edit. -->

Every rule that a module promises to keep, in the words of its docstring, and the files with the tests that carry its
name. `make check` fails on a rule without such a test. [Reliability](reliability.md) says what the rules add up to.
"""

FAULTS_HEAD = """# Faults

<!-- Written by `python -m docs.generate` from `tests/faults/catalogue.py` and the test campaigns; do not edit. -->

Every fault that StreamRL has an answer for: what breaks, what happens then, what you see of it, and the tests that
break it. [Reliability](reliability.md) explains why it works. Paths are below `tests/`. `chaos:NAME` runs with
`python -m tests.chaos --only NAME --runs 1 --seeds 0`, and also checks all rules of the history checker.
`simulation:NAME` runs with `python -m tests.simulation --scenario NAME`.
"""

FIGURES_HEAD = """# Figures of a run

<!-- Written by `python -m docs.generate` from the figures' own descriptions; do not edit. -->

The figures of a running run. `streamrl status --json`, `streamrl top --json` and the page of `streamrl ui` use these
names. Without `--json` the commands show the same values in words. [Concepts](concepts.md) explains the terms.
"""

WHOLE_RUNS = """
## A whole run

`summary.json` and `streamrl report --json` describe the whole run:

- `trajectories`, `trajectories_per_s`, `tokens_per_s` (tokens of completions), `staleness_mean`, `staleness_max` and
  `trainer_wait_share` are over all optimizer steps; rates are over the time of the steps (`step_seconds`);
- `reward_first` and `reward_last` are means over the first and the last `reward_steps` steps, at most five;
- `skipped` counts by reason; `lag` counts the trajectories left over at the end, also by length bucket.

`metrics.jsonl`, trackers and `streamrl_step_metric` hold each step's figures under TRL's names: `reward`,
`off_policy/mean` (staleness; also `max`, `p50`, `p90`, `p99`), `kafka/lag/bucket_0`. The page, `top` and `report.html`
show a histogram of the staleness of trained trajectories.

## Counts of tokens

| figure | counts |
|---|---|
| `completions/num_tokens` | tokens of all completions of a step's groups; `tokens_per_s` is their rate |
| `num_tokens` | tokens of prompts and completions since the run started, as in TRL; `status` shows it |
| `tokens/trained` | completion tokens that count in the loss |
| `tokens/computed` | the part of them that went through the model |

If all samples of a group have the same reward, their advantages and gradients are 0, and the trainer does not compute
them. So `tokens_per_s` is the rate at which the run uses samples. `tokens/computed` divided by `time/forward_backward`
is the speed of the trainer.
"""


def invariants_page() -> str:
    """The page as Markdown."""
    lines = [INVARIANTS_HEAD]
    for package, found in groupby(invariants(), key=_package):
        lines += [f"## {package}", ""]
        for path, named in groupby(found, key=lambda one: one.path):
            lines += [f"**{code(path)}**", "", *(_invariant(one) for one in named), ""]
    return "\n".join(lines).rstrip() + "\n"


def _package(one: Invariant) -> str:
    parts = one.path.split("/")
    return "/".join(parts[:2]) if parts[0] in ("streamrl", "producers", "consumers") and len(parts) > 2 else parts[0]


def _invariant(one: Invariant) -> str:
    meaning = f": {plain(prose(one.meaning)).rstrip('.')}" if one.meaning else ""
    tests = ", ".join(code(path) for path in dict.fromkeys(path for path, name in named_tests() if one.name in name))
    return f"- {code(one.name)}{meaning}. Tested in {tests}."


def faults_page() -> str:
    """The page as Markdown."""
    lines = [FAULTS_HEAD]
    for letter, cases in groupby(CASES, key=lambda case: case.id[0]):
        lines += [f"## {letter}. {SECTIONS[letter]}", ""]
        for case in cases:
            lines += _case(case)
    lines += ["## Campaigns", "", "What the [campaigns](reliability.md#6-how-this-is-tested) draw from.", ""]
    lines += ["### Chaos runs", "", f"{len(FAULTS)} kinds: {_named(each.name for each in FAULTS)}.", ""]
    lines += ["### Scenarios of the simulation", "", f"{len(SCENARIOS)}: {_named(SCENARIOS)}.", ""]
    lines += [
        "### Crash points",
        "",
        f"The {len(POINTS_OF_RANKS)} points at which a trainer of several ranks is killed:",
        "",
    ]
    lines += [*(f"- {point.name}" for point in POINTS_OF_RANKS), ""]
    lines += ["Workers, dispatchers and relays are killed at:", "", *(f"- {point.name}" for point in POINTS_ELSEWHERE)]
    lines += ["", "### Planted bugs", "", f"`make mutants` plants {len(MUTANTS)} bugs and expects tests to fail:", ""]
    lines += table(("bug", "what it is"), [(mutant.id, plain(mutant.description)) for mutant in MUTANTS])
    return "\n".join(lines).rstrip() + "\n"


def _case(case: Case) -> Iterator[str]:
    yield f"**{case.id}**: {plain(case.breaks)}. {plain(case.outcome)}"
    yield ""
    if case.seen:
        yield f"- You see: {plain(case.seen)}."
    yield f"- Tests: {_named(case.tests)}."
    yield ""


def _named(names: Iterable[str]) -> str:
    return ", ".join(code(name) for name in names)


def figures_page() -> str:
    """The page as Markdown."""
    rows = [(code(name), figure.unit or "–", figure.meaning) for name, figure in LIVE.items()]
    return FIGURES_HEAD + "\n" + "\n".join(table(("name", "unit", "meaning"), rows)) + "\n" + WHOLE_RUNS
