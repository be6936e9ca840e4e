"""What the real roles do when hours pass, which virtual time makes seconds of."""

from typing import Any

from streamrl.planning.simulation import SimulatedPipeline, SimulatedRun
from streamrl.schemas.messages import Message
from streamrl.schemas.reports import SkipRecord, StepReport
from streamrl.schemas.topics import SKIPS, STEPS, TRAJECTORIES, WORK_ORDERS, Topic
from streamrl.schemas.trajectories import Prompt, Trajectory, WorkOrder
from streamrl.settings.loading import validated
from streamrl.settings.tree import Settings

SHORT, LONG = 500, 80_500
"""Tokens, of 10 ms and a little more each: the siblings of a group end more than 800 s apart."""


class Siblings:
    """Every group has short completions and a long one."""

    def prompt_at(self, position: int) -> tuple[Prompt, int]:
        lengths = [SHORT, SHORT, SHORT, LONG]
        prompt = Prompt(prompt_id=f"toy/{position}", dataset="toy", content="?", columns={"length": lengths})
        return prompt, 0


def settings(**sections: dict[str, Any]) -> Settings:
    return validated(
        {
            "run": {"workers": 2},
            "data": {"dataset": "chain_sum"},
            "loop": {
                "mode": "trajectory_async",
                "max_staleness": 1,
                "groups_per_step": 2,
                "num_generations": 4,
                "max_completion_length": 100_000,
            },
            "generation": {"engine": "emulated", "max_num_seqs": 4},
            "training": {"backend": "emulated", "max_steps": 4},
            "emulation": {"time_scale": 1.0, "lengths": {"source": "column"}},
        }
        | sections
    )


def messages(run: SimulatedRun, topic: Topic) -> list[Message]:
    return [
        record.message() for log in run.bus.log(topic.full_name(run.name)).partitions for record in log if record.value
    ]


def test_no_sibling_is_dropped_or_ordered_again_however_far_apart_they_end() -> None:
    """With the default time-outs: leases of 8 s, orders of 300 s; and orders that wait for a slot as long."""
    found = settings()
    run = SimulatedPipeline(found, source=Siblings(), chunk_tokens=400).run()
    samples = [one for one in messages(run, TRAJECTORIES) if isinstance(one, Trajectory)]
    reports = [one for one in messages(run, STEPS) if isinstance(one, StepReport) and one.group_ids]
    orders = [one for one in messages(run, WORK_ORDERS) if isinstance(one, WorkOrder)]
    trained = {ref.trajectory_id for report in reports for ref in report.trained_refs}
    assert found.dispatch.order_timeout_s == 300.0
    assert max(one.finished_at - one.started_at for one in samples) > 800.0
    assert len(reports) == 4
    assert len(trained) == 4 * 2 * 4
    assert [one for one in messages(run, SKIPS) if isinstance(one, SkipRecord)] == []
    assert {order.attempt for order in orders} == {0}
