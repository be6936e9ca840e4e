"""What a dry run says of rewards: what rows are paid, and what keeps completions from being paid."""

import re
from collections.abc import Sequence
from typing import Any, Literal

from streamrl.deploy.local.task_check import REWARDS_PATIENCE_S, fails_too_often, rewards_too_few, writer_of
from streamrl.init.checklist import Check, Report
from streamrl.producers.generation.tokenizer import ModelTokenizer
from streamrl.producers.prompts.columns import COMPARING
from streamrl.producers.rewards.answers import drops_unit, has_letters_as_unit, written_form
from streamrl.producers.rewards.trial import RewardTrial, RewardTrials, TriedRow, made_up, try_rewards
from streamrl.schemas.trajectories import Prompt
from streamrl.settings.tree import Settings

SHOWN_ROWS = 5
_OPEN_TAG = re.compile(r"<\w+>$")
MAX_SHOWN_CHARACTERS = 60
"""Most characters of a prompt's start, and of its end, that are shown."""


async def check_rewards(
    settings: Settings,
    prompts: Sequence[Prompt],
    tokenizer: ModelTokenizer | None = None,
    show: Report = lambda line: None,
) -> list[Check]:
    """Checks that try each reward function on these rows, within a time limit; ``show`` gets the first rows.

    Raises:
        RewardLoadError: a function cannot be loaded.
    """
    writer = made_up if tokenizer is None else writer_of(settings, tokenizer)
    trials = await try_rewards(settings.rewards, prompts, REWARDS_PATIENCE_S, writer)
    for row in trials.rows[:SHOWN_ROWS]:
        show(_row_line(row, trials, tokenizer))
    checks = [_reward_check(trial, trials, settings) for trial in trials.functions]
    bound = f"above ingest.max_unrewarded_share ({settings.ingest.max_unrewarded_share:.0%}) a run stops"
    if trials.unrewarded and all(check.state != "fail" for check in checks):
        state: Literal["note", "fail"] = "fail" if rewards_too_few(trials, settings) else "note"
        checks.append(Check("rewards", state, f"no function pays anything on {trials.unrewarded_rows()}; {bound}"))
    if changed := [row for row in trials.rows if row.has_answer and row.is_changed]:
        first, count = changed[0], f"{len(changed)} of {len(trials.rows)}"
        became = f"first {first.prompt.prompt_id}: {cut(first.text)} becomes {cut(first.own[0])}"
        checks.append(Check("rewards", "note", f"rewards would see {count} answers changed by the tokenizer, {became}"))
    return checks + (_on_forms(trials.rows) if settings.data.path else [])


def _row_line(row: TriedRow, trials: RewardTrials, tokenizer: ModelTokenizer | None) -> str:
    """A row as model and rewards see it: the prompt, its answer, and the rewards of the answer."""
    prompt = row.prompt
    text = (rendered_by(tokenizer, prompt) if tokenizer else None) or prompt.text
    paid = ", ".join(
        f"{trial.name} {_shown(trial.rewards[prompt.prompt_id][0])}"
        if prompt.prompt_id in trial.rewards
        else f"{trial.name} fails"
        for trial in trials.functions
    )
    answer = f"answer {cut(prompt.columns['answer'])}" if "answer" in prompt.columns else "no answer"
    return f"{prompt.prompt_id}  {cut(text)}  {answer}  paid for itself: {paid}"


def _reward_check(trial: RewardTrial, trials: RewardTrials, settings: Settings) -> Check:
    state: Literal["ok", "note", "fail"]
    share = settings.ingest.max_unrewarded_share
    if trial.failed:
        state = "fail" if fails_too_often(trial, settings) else "note"
        failed = f"{trial.name} fails on {len(trial.failed)} of {trial.rows} rows ({trial.share:.0%})"
        bound = f"above ingest.max_unrewarded_share ({share:.0%}) a run stops"
        return Check("rewards", state, f"{failed}, first on {trial.first_error}; {bound}")
    answered = {row.prompt.prompt_id: row for row in trials.rows if row.has_answer}
    own, empty, *other = map("{:.3g}".format, trial.means())
    what = "a row's own answer" if answered else "a sample completion"
    another = f", {other[0]} for another row's" if other else ""
    detail = f"{trial.name} gives {own} for {what}{another}, {empty} for an empty completion ({trial.rows} rows)"
    findings = []
    if trial.is_constant:
        findings.append("it gives the same for all, and a group of equal rewards trains nothing; check the function")
    elif trial.pays_empty:
        findings.append("on every row an empty completion gets as much as the answer; check the function")
    unpaid = [prompt_id for prompt_id in trial.unpaid if prompt_id in answered]
    if unpaid:
        row = answered[unpaid[0]]
        example = f"first {unpaid[0]}: {_shown(trial.rewards[unpaid[0]][0])} for {cut(row.own[0])}"
        findings.append(f"{len(unpaid)} rows get 0 or None for their own answer, {example}")
    if 0 < len(trial.deceived) < len(trial.rewards):
        findings.append(f"{len(trial.deceived)} rows pay another row's answer as much, first {trial.deceived[0]}")
    if trial.function == "exact_match" and (solutions := [row for row in answered.values() if _is_solution(row)]):
        example = f"first {solutions[0].prompt.prompt_id}: {cut(solutions[0].text)}"
        findings.append(f"{len(solutions)} answers are whole solutions, which no completion will equal, {example}")
    findings += _on_units(trial.function, list(answered.values()))
    pays_answers = trial.function in COMPARING and settings.rewards.answer_pattern is None
    state = "fail" if pays_answers and len(unpaid) > share * trial.rows else "note" if findings else "ok"
    return Check("rewards", state, "; ".join([detail, *findings]))


def _on_forms(rows: Sequence[TriedRow]) -> list[Check]:
    """Notes on answers that are texts which a library wrote for another value."""
    found: dict[str, list[TriedRow]] = {}
    for row in rows:
        if isinstance(row.prompt.columns.get("answer"), str) and (form := written_form(row.answer)):
            found.setdefault(form, []).append(row)
    advice = "rewards get the text; write the answers as they are meant, lists in jsonl or parquet"
    return [
        Check(
            "rewards",
            "note",
            f"{len(some)} of {len(rows)} answers are written as {form}, first {some[0].prompt.prompt_id}: "
            f"{cut(some[0].answer)}; {advice}",
        )
        for form, some in found.items()
    ]


def _on_units(function: str, rows: Sequence[TriedRow]) -> list[str]:
    """What a built-in reward makes of the units of these rows' answers."""
    dropped = [row for row in rows if drops_unit(row.answer)]
    kept = [row for row in rows if has_letters_as_unit(row.answer)]
    if function == "exact_match":
        found = [(dropped + kept, "have a unit, without which a completion gets 0")]
    elif function == "math_verify":
        taken = "have letters after the number that are taken for factors, without which a completion gets 0"
        found = [(dropped, "have a unit that is not compared, so that any other is right"), (kept, taken)]
    else:
        return []
    return [
        f"{len(some)} answers {what}, first {some[0].prompt.prompt_id}: {cut(some[0].answer)}"
        for some, what in found
        if some
    ]


def _is_solution(row: TriedRow) -> bool:
    """Whether the row's answer has the way to it, as in GSM8K."""
    return "\n" in row.answer or "####" in row.answer


def _shown(value: float | None) -> str:
    return "None" if value is None else f"{value:g}"


def check_opening(settings: Settings, tokenizer: ModelTokenizer, prompts: Sequence[Prompt]) -> list[Check]:
    """Notes on patterns that look in a completion for a tag with which the prompts end, such as ``<think>``."""
    rendered = (rendered_by(tokenizer, prompts[0]) or "").rstrip()
    if (tag := _OPEN_TAG.search(rendered)) is None:
        return []
    rewards = settings.rewards
    patterns = {"answer_pattern": rewards.answer_pattern or ""}
    if "format" in rewards.functions:
        patterns["format_pattern"] = rewards.format_pattern
    ends = f"{prompts[0].prompt_id} ends with {tag[0]}, so a completion does not start with it"
    return [
        Check("rewards", "note", f"{ends}, but rewards.{name} asks for it: leave {tag[0]} out of the pattern")
        for name, pattern in patterns.items()
        if tag[0] in pattern
    ]


def rendered_by(tokenizer: ModelTokenizer, prompt: Prompt) -> str | None:
    """The prompt's text as the model sees it, with special tokens; None if it cannot be tokenised."""
    try:
        return tokenizer.decode_with_special(tokenizer.encode_prompt(prompt))
    except Exception:  # chat templates raise anything; the check of lengths says what
        return None


def cut(value: Any) -> str:
    """The value's ``repr`` in one line, without the middle if it is long."""
    shown = repr(value)
    if len(shown) <= 2 * MAX_SHOWN_CHARACTERS:
        return shown
    return f"{shown[:MAX_SHOWN_CHARACTERS]} … {shown[-MAX_SHOWN_CHARACTERS:]}"
