"""`streamrl audit` on a run, as a library and as a command; its sums must be those of our own checker."""

import asyncio
import json
import sys
from collections.abc import Mapping
from typing import Any

from streamrl.bus.history import BusHistory
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.consumers.training.checkpoints.catalogue import read_manifests
from streamrl.inspection.audit.audit import audit
from streamrl.inspection.audit.report import AuditReport
from tests.chaos.checking.checker import Findings
from tests.chaos.checking.checkpoints import location_of
from tests.chaos.runs.setting import Setting

COMMAND_S = 180.0


async def audit_problems(
    setting: Setting, address: str, findings: Findings, instances: Mapping[str, Findings] | None = None
) -> list[str]:
    """What the audit finds wrong, and where it disagrees with the checker; ``instances``: those attached, by name."""
    instances = instances or {}
    places = [location_of(each) for each in (setting, *map(setting.of_instance, instances))]
    history = BusHistory(KafkaBus(KafkaSettings(bootstrap_servers=address)))
    try:
        verdict = await audit(history, setting.name, lambda: [each for at in places for each in read_manifests(at)])
    finally:
        await history.close()
    return [*(str(violation) for violation in verdict.violations), *_disagreements(verdict, findings, instances)]


def _disagreements(verdict: AuditReport, findings: Findings, instances: Mapping[str, Findings]) -> list[str]:
    ledgers = [findings, *instances.values()]
    theirs: dict[str, Any] = {"produced": verdict.produced, "balanced": verdict.is_balanced}
    ours: dict[str, Any] = {
        "produced": findings.produced,
        "balanced": not any(each.lost or each.trained_twice for each in ledgers),
    }
    for name, own in {"": findings, **instances}.items():
        of_it = [each for each in verdict.algorithms if (each.algorithm if each.algorithm in instances else "") == name]
        theirs[f"trained {name}"] = sum(each.trained for each in of_it)
        theirs[f"pending {name}"] = sum(each.pending for each in of_it)
        ours[f"trained {name}"], ours[f"pending {name}"] = own.trained, own.pending
    return [] if theirs == ours else [f"the audit says {theirs}, the checker {ours}"]


async def audit_by_command(setting: Setting) -> list[str]:
    """`streamrl audit --json`, as a user calls it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "streamrl", "audit", "--run", str(setting.directory.config), "--json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, complaint = await asyncio.wait_for(process.communicate(), COMMAND_S)
    if process.returncode != 0:
        return [f"the audit command ended with {process.returncode}: {complaint.decode()[-500:]}"]
    return [] if json.loads(output)["balanced"] else ["the audit command says that the books do not balance"]
