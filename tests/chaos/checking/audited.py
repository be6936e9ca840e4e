"""`streamrl audit` on a run, as a library and as a command; its sums must be those of our own checker."""

import asyncio
import json
import sys

from bus.history import BusHistory
from bus.kafka.bus import KafkaBus
from bus.kafka.settings import KafkaSettings
from consumers.training.checkpoints.catalogue import read_manifests
from inspection.audit.audit import audit
from inspection.audit.report import AuditReport
from tests.chaos.checking.checker import Findings
from tests.chaos.checking.checkpoints import location_of
from tests.chaos.runs.setting import Setting

COMMAND_S = 180.0


async def audit_problems(setting: Setting, address: str, findings: Findings) -> list[str]:
    """What the audit finds wrong, and where it disagrees with the checker."""
    history = BusHistory(KafkaBus(KafkaSettings(bootstrap_servers=address)))
    try:
        verdict = await audit(history, setting.name, lambda: read_manifests(location_of(setting)))
    finally:
        await history.close()
    return [*(str(violation) for violation in verdict.violations), *_disagreements(verdict, findings)]


def _disagreements(verdict: AuditReport, findings: Findings) -> list[str]:
    theirs = {
        "produced": verdict.produced,
        "trained": sum(each.trained for each in verdict.algorithms),
        "pending": sum(each.pending for each in verdict.algorithms),
        "balanced": verdict.is_balanced,
    }
    ours = {
        "produced": findings.produced,
        "trained": findings.trained,
        "pending": findings.pending,
        "balanced": not findings.lost and not findings.trained_twice,
    }
    return [] if theirs == ours else [f"the audit says {theirs}, the checker {ours}"]


async def audit_by_command(setting: Setting) -> list[str]:
    """`streamrl audit --json`, as a user calls it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "streamrl.cli.app", "audit", str(setting.directory.config), "--json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, complaint = await asyncio.wait_for(process.communicate(), COMMAND_S)
    if process.returncode != 0:
        return [f"the audit command ended with {process.returncode}: {complaint.decode()[-500:]}"]
    return [] if json.loads(output)["balanced"] else ["the audit command says that the books do not balance"]
