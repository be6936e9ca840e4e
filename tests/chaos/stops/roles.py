"""The roles and edges that are stopped within a process, by name."""

from importlib import import_module

from tests.chaos.stops.moment import Role

ROLES = {
    "gateway": "tests.chaos.stops.gateway:gateway",
    "relay of the store": "tests.chaos.stops.relay:of_the_store",
    "relay of copies": "tests.chaos.stops.relay:of_copies",
    "worker": "tests.chaos.stops.worker:worker",
    "coordinator": "tests.chaos.stops.coordinator:of_a_run",
    "dispatcher": "tests.chaos.stops.dispatcher:of_a_run",
    "trainer": "tests.chaos.stops.trainer:trainer",
    "evaluator": "tests.chaos.stops.evaluator:evaluator",
    "page": "tests.chaos.stops.page:page",
    "export": "tests.chaos.stops.exporting:export",
}


def find_role(name: str) -> Role:
    """Imported only now: some bring torch along."""
    module, _, attribute = ROLES[name].partition(":")
    found: Role = getattr(import_module(module), attribute)
    return found
