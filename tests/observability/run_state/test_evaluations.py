"""Evaluations of weights that a crash or an operator undid are not shown."""

from streamrl.observability.run_state.evaluations import OVERALL
from streamrl.observability.run_state.state import RunState
from streamrl.schemas.evaluation import EvaluationReport
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import StepReport
from tests.schemas.examples import examples


def evaluated(version: PolicyVersion, passed: float) -> EvaluationReport:
    report = examples()["evaluation-report"]
    assert isinstance(report, EvaluationReport)
    return report.replace(version=version, step=version.number, metrics={OVERALL: passed})


def started(version: PolicyVersion, parent: PolicyVersion) -> StepReport:
    report = examples()["step-report"]
    assert isinstance(report, StepReport)
    return report.replace(version=version, step=version.number, parent=parent, policy=None, finished=False)


def test_the_only_set_of_prompts_is_drawn_once() -> None:
    state = RunState("r")
    for number, sets in ((1, ("math",)), (2, ("math", "code"))):
        report = evaluated(PolicyVersion(1, number), 0.5)
        state.observe_message(report.replace(metrics={OVERALL: 0.5, **{f"eval/{name}/pass@1": 0.5 for name in sets}}))
        drawn = [*state.learning.evaluations.columns()]
        assert drawn == ["step", OVERALL] if number == 1 else ["step", "eval/code/pass@1", "eval/math/pass@1", OVERALL]


def test_an_undone_evaluation_is_in_no_summary() -> None:
    state = RunState("r")
    for number in (0, 400, 450):
        state.observe_message(evaluated(PolicyVersion(1, number), number / 1000))
    state.observe_message(started(PolicyVersion(2, 400), PolicyVersion(1, 400)))
    state.observe_message(evaluated(PolicyVersion(1, 450), 0.45))  # read late
    rows = state.learning.evaluations.rows
    assert [version.number for version, _ in rows] == [0, 400]
    state.observe_message(evaluated(PolicyVersion(2, 450), 0.5))
    assert state.learning.evaluations.pass_at_1 == 0.5
    assert [version.number for version, _ in state.learning.evaluations.rows] == [0, 400, 450]
