from pathlib import Path

from benchmarks.audit.__main__ import CONFIG, RUN
from benchmarks.audit.followed import following
from benchmarks.audit.made_up import MadeUpRun
from streamrl.bus.history import BusHistory
from streamrl.bus.memory import MemoryBus
from streamrl.inspection.audit.audit import audit
from streamrl.settings.loading import load_settings
from tests.fakes.topics import create_topics


async def test_the_run_that_is_timed_balances_and_has_a_crash_in_it() -> None:
    bus = create_topics(MemoryBus(), "r", 3)
    manifest = await MadeUpRun(bus, "r", 3000, 3, tokens=4).write()
    verdict = await audit(BusHistory(bus), "r", lambda: [manifest])
    assert verdict.is_balanced
    (own,) = verdict.algorithms
    assert own.produced == 3000
    assert own.lineages == (1, 2)
    assert own.undone.steps == 3
    assert own.checkpoint == str(manifest.policy_version)
    assert verdict.ordered == 3000


def test_its_configuration_is_one_of_a_run(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(CONFIG)
    assert load_settings(config, []).run.name == RUN


def test_a_follower_of_it_agrees_with_the_audit_while_it_is_timed() -> None:
    found = following(records=6000, looks=10)  # compares their reports at every fifth look
    assert found["looks"] >= 5
    assert found["not_settled"] > 0  # too few for a segment
