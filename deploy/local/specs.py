"""Makes the specs of a run's processes for the supervisor: command, environment, log, and the meaning of an exit."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from streamrl.deploy.local.forking import ForkServer
from streamrl.deploy.local.supervisor import ChildSpec
from streamrl.schemas.import_path import module_command
from streamrl.settings.features import ChildProcess, standby_arguments
from streamrl.settings.placement import UNPLACED, Placement, ProcessPlace
from streamrl.settings.run_directory import RunDirectory

AUDIT_EVERY_S = 30
"""Seconds between two lines of the audit, which should leave the CPU to the run."""


@dataclass(frozen=True)
class ChildSpecs:
    """Makes the specs of one run's processes.

    ``overrides``: options for all of their command lines. ``secrets``: environment variables with the secrets, which
    the resolved file masks. ``placement``: their devices and threads. ``base`` forks the processes, except those of the
    roles in ``of_roles``; None: each gets a new interpreter.
    """

    directory: RunDirectory
    overrides: Sequence[str]
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    placement: Placement = UNPLACED
    base: ForkServer | None = None
    of_roles: Mapping[str, ForkServer] = field(default_factory=dict)

    def all(
        self,
        workers: int,
        *,
        trainer: bool = True,
        standbys: int = 0,
        dispatcher: bool = True,
        others: Iterable[ChildProcess] = (),
    ) -> list[ChildSpec]:
        """Coordinator, relay, trainer, standby trainers, workers, dispatcher, and the ``others``.

        The run ends when a trainer has exited successfully, and then all awaited processes.
        """
        standby_trainers = [self.trainer(f"standby-{number}") for number in range(standbys)]
        return [
            replace(self.of("coordinator", "coordinator"), is_single=True),
            self.of("relay", "relay"),
            *([self.trainer("trainer")] if trainer else []),
            *(replace(each, command=each.standby) for each in standby_trainers),
            *(self.worker(number) for number in range(workers)),
            *([replace(self.of("dispatcher", "dispatcher"), is_single=True)] if dispatcher else []),
            *(self.added(process) for process in others),
        ]

    def added(self, process: ChildProcess) -> ChildSpec:
        """A process of a feature."""
        return replace(
            self.of(
                process.name,
                process.role,
                *process.arguments,
                place=self.placement.trainer if process.on_trainer_devices else None,
            ),
            optional=process.optional,
            awaited=process.awaited,
            is_single=process.is_single,
        )

    def trainer(self, name: str) -> ChildSpec:
        """A trainer that leads; if it restarts while another one leads, it becomes a standby on the same devices."""
        place, arguments = self.placement.trainer, standby_arguments()
        standby = self.of(name, "trainer", *arguments, place=place).command if arguments else ()
        return replace(self.of(name, "trainer", place=place), essential=True, standby=standby)

    def worker(self, number: int) -> ChildSpec:
        """A generation worker, whose id is the name of its process."""
        name = f"worker-{number}"
        return self.of(name, "worker", "--id", name, place=self.placement.worker(number))

    def audit(self, address: str) -> ChildSpec:
        """An audit during the run; the run continues without it."""
        command = module_command("streamrl", "audit", "--run", str(self.directory.path), "--follow")
        command += ["--interval", str(AUDIT_EVERY_S)]
        placed = self.placement.others.environment
        environment = {**placed, "STREAMRL_KAFKA__BOOTSTRAP_SERVERS": address, **self.secrets}
        return ChildSpec("audit", command, self.directory.logs / "audit.log", environment, optional=True)

    def of(self, name: str, role: str, *arguments: str, place: ProcessPlace | None = None) -> ChildSpec:
        """A process of a role; without ``place`` it gets the devices and threads of the other processes."""
        command = module_command("streamrl", role, str(self.directory.config), *arguments)
        environment = (place or self.placement.others).environment | dict(self.secrets)
        log_path, forked_by = self.directory.logs / f"{name}.log", self.of_roles.get(role, self.base)
        return ChildSpec(name, [*command, *self.overrides], log_path, environment, forked_by=forked_by)
