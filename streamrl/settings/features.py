"""Everything that an optional feature adds to a run, as its folder's ``role.py`` declares it.

The rest of the tree looks features up here and never imports one directly. A ``role.py`` must load quickly, so it
imports the code of its processes only when it builds them.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from streamrl.schemas.errors import UserError
from streamrl.settings.feature_folders import FOLDERS

if TYPE_CHECKING:
    from pathlib import Path

    import typer
    from rich.text import Text

    from streamrl.consumers.training.session import PartsOf, TrainerContext
    from streamrl.coordinator.coordinator import LastEvaluation
    from streamrl.coordinator.policies import CoordinatorContext, PolicyControl
    from streamrl.observability.metrics.families import Family
    from streamrl.observability.role_context import ProcessContext, Role
    from streamrl.observability.run_state.parts import RunPart
    from streamrl.observability.tracing.role_tracers import OpenTracer
    from streamrl.producers.dispatch.choosing import PromptChooser
    from streamrl.producers.dispatch.policies import PolicyDispatch
    from streamrl.producers.generation.side_work import SideWorkFactory
    from streamrl.producers.lengths.startup import OpenPredictor
    from streamrl.schemas.control import OperatorAction
    from streamrl.schemas.evaluation import HeldOut
    from streamrl.schemas.messages import Message
    from streamrl.schemas.starts import RunInput
    from streamrl.settings.tree import Settings
    from streamrl.weights.series import WantedSeries

T = TypeVar("T")


@dataclass(frozen=True)
class ExclusionRule:
    """Settings (``keys``) that have a meaning only if ``applies`` returns true.

    ``deciders`` are the settings that ``applies`` reads. ``because`` returns the values that rule the keys out.
    """

    keys: tuple[str, ...]
    deciders: tuple[str, ...]
    applies: "Callable[[Settings], bool]"
    because: "Callable[[Settings], str]"


@dataclass(frozen=True)
class ChildProcess:
    """A process that ``streamrl run`` starts for a feature.

    ``name`` names the process and its log; ``role`` and ``arguments`` are its command. ``optional``: the run continues
    without it. ``awaited``: the run waits for this process to end. ``is_single``: a run has only one of it.
    ``on_trainer_devices``: it gets the trainer's devices.
    """

    name: str
    role: str
    arguments: tuple[str, ...] = ()
    optional: bool = False
    awaited: bool = False
    is_single: bool = False
    on_trainer_devices: bool = False


@dataclass(frozen=True)
class FeatureRole:
    """A kind of process. ``help`` is its command's help text; lists of commands show its first line alone.

    ``build`` constructs the process and raises ``UserError`` if the settings do not fit. ``has_id``: a run may have
    several, each with its own id. ``leads``: it fences or leads other processes of its run, so it refuses topics that
    belong to another run of the same name. ``tracer`` opens its tracer; None: it is not traced. ``observed_as``: the
    core role whose metrics and traces it uses.
    """

    name: str
    help: str
    build: "Callable[[Settings, ProcessContext], Role]"
    has_id: bool = False
    leads: bool = False
    tracer: "OpenTracer | None" = None
    observed_as: str = ""


@dataclass(frozen=True)
class Sending:
    """Sends weights to engines without files.

    ``transfer``: vLLM's name for the method; ``address``: the sender that workers ask for weights.
    """

    transfer: str = ""
    address: str = ""


@dataclass(frozen=True)
class OwnEndpoint:
    """The endpoint where a feature answers requests to the policy, for use by other features of the run.

    ``is_enabled``: ``streamrl run`` starts it. ``address`` is empty if the port is known only after the start.
    ``model``: the policy's name in requests. ``new_key`` takes a holder's name and replaces that holder's API key.
    """

    is_enabled: bool
    address: str
    model: str
    new_key: Callable[[str], str]


class PolicyOperators(Protocol):
    """An operator's commands for several policies on one stream.

    All raise ``UserError`` if the run is not running, or does not allow the change.
    """

    def instances(self, run: "Path") -> "list[dict[str, Any]]":
        """The policies that learn from the stream, the run's own first, each with its last command and state."""
        ...

    def split(self, run: "Path", shares: "Mapping[str, float]", reason: str) -> None:
        """Set the share of the groups that each instance samples; with no shares the served policy samples them all."""
        ...

    def tell(self, run: "Path", action: "OperatorAction", name: str, reason: str) -> None:
        """Order an instance to pause, resume or stop, or the workers to follow it."""
        ...


@dataclass(frozen=True)
class PolicyHooks:
    """What changes if several policies may share the stream.

    ``control`` is for the coordinator, ``dispatch`` for dispatcher and evaluator, ``wanted_series`` for workers and
    relays, ``operators`` for the Python API. ``lead_trainer`` builds a trainer that sends heartbeats. It takes the
    trainer's context, the seconds between two heartbeats, and a function that returns the trainer's parts, given
    whether its policy is served.
    """

    control: "Callable[[CoordinatorContext], PolicyControl]"
    dispatch: "Callable[[], PolicyDispatch]"
    lead_trainer: "Callable[[TrainerContext, float, PartsOf], Role]"
    wanted_series: "Callable[[], WantedSeries]"
    operators: PolicyOperators


def _as_given(tree: "dict[str, Any]") -> "dict[str, Any]":
    return tree


def _no_policy(_: "Message") -> str | None:
    return None


def _no_result(evaluations: object, settings: object) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Displays:
    """What the displays of a run show for a feature.

    ``part`` builds its part of a run's state, given the run's name; None: it has no part. ``sections`` names the
    sections that the part adds to a snapshot. ``held_out`` returns the result on held-out prompts with which a report
    starts, given the run's evaluations (step, metrics) and settings; None: the feature has no result there.
    ``worker_rows`` returns the rows that a terminal draws below the workers, given a snapshot's sections and the width
    of a name in cells. ``policy_in`` returns the policy for which a control message announces separate topics, which
    audits and exports then read too; None for any other message.
    """

    part: "Callable[[str], RunPart] | None" = None
    held_out: "Callable[[Sequence[tuple[int, Mapping[str, float]]], Mapping[str, Any]], HeldOut | None]" = _no_result
    sections: tuple[str, ...] = ()
    worker_rows: "Callable[[Mapping[str, Any], int], list[Text]]" = lambda data, name: []
    policy_in: "Callable[[Message], str | None]" = _no_policy


def _no_processes(_: "Settings") -> Sequence[ChildProcess]:
    return ()


def _nothing(_: "Settings") -> None:
    pass


def _no_lines(_: "Settings") -> Sequence[str]:
    return ()


def _no_inputs(_: "Settings") -> "Sequence[RunInput]":
    return ()


def _zero(_: "Settings") -> int:
    return 0


def _no(_: "Settings") -> bool:
    return False


def _none(_: "Settings") -> None:
    return None


async def _nothing_to_try(_: "Settings") -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class SettingsRules:
    """The combinations of settings that a feature rules out, and those that it fills in.

    ``complete`` adds to the tree what follows from other sections, before the tree is validated. ``check`` raises
    ``SettingsError`` if sections contradict each other; ``exclusions``: keys that other settings make meaningless.
    """

    complete: "Callable[[dict[str, Any]], dict[str, Any]]" = _as_given
    check: "Callable[[Settings], None]" = _nothing
    exclusions: tuple[ExclusionRule, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FeatureProcesses:
    """The processes of a feature.

    ``roles``: all its kinds of process, each with its command; ``started``: the processes that ``streamrl run`` starts
    with these settings. ``standbys``: number of standby trainers that it starts; ``standby_arguments``: arguments of
    the trainer's command that make it a standby. ``awaited``: the evaluation that a run waits for before it ends.
    """

    roles: tuple[FeatureRole, ...] = ()
    started: "Callable[[Settings], Sequence[ChildProcess]]" = _no_processes
    standbys: "Callable[[Settings], int]" = _zero
    standby_arguments: tuple[str, ...] = ()
    awaited: "Callable[[Settings], LastEvaluation | None]" = _none


@dataclass(frozen=True, kw_only=True)
class StartHooks:
    """What ``streamrl run`` does for a feature before it starts processes.

    ``packages`` raises ``SettingsError`` if a package that the feature needs is not installed. ``check`` runs before
    anything is written, such as a check for a free port; it raises ``UserError``. ``try_out`` tries something that the
    run will use, such as a user's class. It returns its result in one line, or None if there is nothing to try, and
    raises ``UserError``. ``notes``: advice on the settings, for a run that can start. ``inputs``: files and code that
    the feature depends on besides settings, to notice changes. ``lines``: lines to print. ``options``: options for all
    processes of the run that are known only at its start, such as a free port.
    """

    packages: "Callable[[Settings], None]" = _nothing
    check: "Callable[[Settings], None]" = _nothing
    try_out: "Callable[[Settings], Coroutine[Any, Any, str | None]]" = _nothing_to_try
    inputs: "Callable[[Settings], Sequence[RunInput]]" = _no_inputs
    notes: "Callable[[Settings], Sequence[str]]" = _no_lines
    lines: "Callable[[Settings], Sequence[str]]" = _no_lines
    options: "Callable[[Settings], Sequence[str]]" = _no_lines


@dataclass(frozen=True, kw_only=True)
class LoopHooks:
    """What a feature changes in the roles of the core.

    ``predictors``: predictors of output length, by their name in the settings. ``takes_samples``: whether samples pass
    through this feature's processes before they reach the trainer. ``sending``: how weights reach engines without
    files. ``side_work``: work that workers do for it in addition to their orders; ``asks_for_schemas``: whether it
    needs engines that can follow JSON schemas. ``endpoint``: where it answers requests to the policy. ``policies``:
    what changes if several policies may share the stream. ``chooser`` makes the object that decides which prompts are
    ordered; None: all are.
    """

    predictors: "Mapping[str, OpenPredictor]" = field(default_factory=dict)
    takes_samples: "Callable[[Settings], bool]" = _no
    sending: "Callable[[Settings], Sending | None]" = _none
    side_work: "Callable[[Settings], SideWorkFactory | None]" = _none
    asks_for_schemas: "Callable[[Settings], bool]" = _no
    endpoint: "Callable[[Settings], OwnEndpoint | None]" = _none
    policies: "PolicyHooks | None" = None
    chooser: "Callable[[Settings], Callable[[], PromptChooser] | None]" = _none


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Everything that an optional feature adds to a run.

    Args:
        name: the feature in plain words.
        settings: combinations of settings that it rules out.
        processes: its processes.
        start: what ``streamrl run`` does for it before it starts processes.
        loop: its changes to the roles of the core.
        displays: what displays show for it.
        families: metrics that its processes export.
        commands: adds commands other than those of its roles.
    """

    name: str
    settings: SettingsRules = field(default_factory=SettingsRules)
    processes: FeatureProcesses = field(default_factory=FeatureProcesses)
    start: StartHooks = field(default_factory=StartHooks)
    loop: LoopHooks = field(default_factory=LoopHooks)
    displays: Displays | None = None
    families: "Callable[[], tuple[Family, ...]]" = tuple
    commands: "Callable[[typer.Typer], None]" = lambda app: None


@cache
def features() -> tuple[Feature, ...]:
    """All features of this tree, in the order of ``FOLDERS``."""
    return tuple(import_module(f"streamrl.{folder}.role").FEATURE for folder in FOLDERS)


def first_of(provided: "Callable[[Feature], T | None]") -> "T | None":
    """The first value other than None that ``provided`` returns for a feature; None if there is none."""
    return next((found for feature in features() if (found := provided(feature)) is not None), None)


def policy_hooks() -> PolicyHooks | None:
    """What changes if several policies may share the stream; None: this tree supports only one."""
    return first_of(lambda feature: feature.loop.policies)


def policy_dispatch() -> "Callable[[], PolicyDispatch]":
    """Builds the policy logic of dispatcher and evaluator."""
    from streamrl.producers.dispatch.policies import OnePolicyDispatch

    hooks = policy_hooks()
    return OnePolicyDispatch if hooks is None else hooks.dispatch


def prompt_chooser(settings: "Settings") -> "Callable[[], PromptChooser]":
    """Makes the object that decides which prompts the dispatcher orders."""
    from streamrl.producers.dispatch.choosing import EveryPrompt

    return first_of(lambda feature: feature.loop.chooser(settings)) or EveryPrompt


def wanted_series() -> "Callable[[], WantedSeries]":
    """Builds the logic by which workers and relays choose series of weights."""
    from streamrl.weights.series import OwnSeries

    hooks = policy_hooks()
    return OwnSeries if hooks is None else hooks.wanted_series


def policy_operators() -> PolicyOperators:
    """An operator's commands for several policies.

    Raises:
        UserError: the feature is not in this tree.
    """
    if (hooks := policy_hooks()) is None:
        raise UserError("expected the feature for several policies on one stream, got a tree without it")
    return hooks.operators


def displays() -> tuple[Displays, ...]:
    """What displays show for the features."""
    return tuple(each.displays for each in features() if each.displays is not None)


def run_parts(run: str) -> "tuple[RunPart, ...]":
    """The parts that features add to a run's state."""
    return tuple(display.part(run) for display in displays() if display.part is not None)


def feature_sections() -> tuple[str, ...]:
    """The names of sections that features add to a snapshot."""
    return tuple(name for display in displays() for name in display.sections)


def standbys(settings: "Settings") -> int:
    """The number of standby trainers."""
    return sum(feature.processes.standbys(settings) for feature in features())


def standby_arguments() -> tuple[str, ...]:
    """Arguments that make a trainer a standby; empty if no feature of this tree offers that."""
    return next((each.processes.standby_arguments for each in features() if each.processes.standby_arguments), ())


def predictors() -> "dict[str, OpenPredictor]":
    """The predictors of output length that features add, by name."""
    return {name: made for feature in features() for name, made in feature.loop.predictors.items()}


def metric_families() -> "tuple[Family, ...]":
    """Every metric that processes of this tree export."""
    from streamrl.observability.metrics.families import CORE_FAMILIES

    return (*CORE_FAMILIES, *(family for feature in features() for family in feature.families()))


def awaited(settings: "Settings") -> "LastEvaluation | None":
    """The evaluation that the run waits for before it ends; None: the run's topics carry no evaluations."""
    return first_of(lambda feature: feature.processes.awaited(settings))


def feature_role(name: str) -> FeatureRole | None:
    """The role of this name; None if no feature has it."""
    return next((role for feature in features() for role in feature.processes.roles if role.name == name), None)
