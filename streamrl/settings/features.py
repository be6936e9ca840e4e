"""What an optional feature brings to a run, by its folder's ``role.py``.

The rest of the tree asks for features here and never imports one. A ``role.py`` loads quickly: what it builds is
imported when it is built.
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
    from streamrl.producers.dispatch.policies import PolicyDispatch
    from streamrl.producers.generation.side_work import SideWorkFactory
    from streamrl.producers.lengths.startup import OpenPredictor
    from streamrl.schemas.control import OperatorAction
    from streamrl.schemas.messages import Message
    from streamrl.settings.tree import Settings
    from streamrl.weights.series import WantedSeries

T = TypeVar("T")


@dataclass(frozen=True)
class ExclusionRule:
    """``keys`` mean nothing unless ``applies``, which ``deciders`` decide; ``because`` names what rules them out."""

    keys: tuple[str, ...]
    deciders: tuple[str, ...]
    applies: "Callable[[Settings], bool]"
    because: "Callable[[Settings], str]"


@dataclass(frozen=True)
class ChildProcess:
    """A process that ``streamrl run`` starts for a feature.

    ``name``: of the process and its log; ``role``: its command, with ``arguments``. ``optional``: the run goes on
    without it. ``awaited``: the run ends only when it has ended. ``is_single``: there is one in a run.
    ``beside_trainer``: it has the trainer's devices.
    """

    name: str
    role: str
    arguments: tuple[str, ...] = ()
    optional: bool = False
    awaited: bool = False
    is_single: bool = False
    beside_trainer: bool = False


@dataclass(frozen=True)
class FeatureRole:
    """A kind of process. ``help``: of its command, the first line by itself.

    ``build`` makes it; raises ``UserError`` where the settings are not what it needs. ``has_id``: there are several,
    each with a name of its own. ``leads``: it fences or leads others of its run, so it refuses topics that belong to
    another run of the same name. ``tracer`` opens what traces it; None: it is not traced. ``observed_as``:
    the role of the core whose metrics and traces it has.
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
    """A way of weights into engines without files. ``transfer``: what vLLM calls it; ``address``: where workers ask."""

    transfer: str = ""
    address: str = ""


@dataclass(frozen=True)
class OwnEndpoint:
    """Where a feature answers requests to the policy, for other features of the run.

    ``is_enabled``: ``streamrl run`` starts it. ``address``: empty if its port is not known before it starts. ``model``:
    what requests call the policy. ``new_key`` makes a key for the holder of that name, in place of its former one.
    """

    is_enabled: bool
    address: str
    model: str
    new_key: Callable[[str], str]


class PolicyOperators(Protocol):
    """What an operator does about several policies on one stream. All raise ``UserError`` where the run is not under
    way, or cannot be changed so.
    """

    def instances(self, run: "Path") -> "list[dict[str, Any]]":
        """What learns from the stream, the run's own trainer first: what each was told, and how it stands."""
        ...

    def split(self, run: "Path", shares: "Mapping[str, float]", reason: str) -> None:
        """Let instances sample a share of the groups each; without shares the served policy samples everything."""
        ...

    def tell(self, run: "Path", action: "OperatorAction", name: str, reason: str) -> None:
        """Tell an instance to pause, go on or end, or workers to follow it."""
        ...


@dataclass(frozen=True)
class PolicyHooks:
    """What changes where several policies may share the stream.

    ``control``: what the coordinator asks; ``dispatch``: what dispatcher and evaluator ask. ``lead_trainer``: a trainer
    with its sign of life, by its context, seconds between two beats, and its parts by whether its policy is served.
    ``wanted_series``: what workers and relays ask. ``operators``: what the Python API does.
    """

    control: "Callable[[CoordinatorContext], PolicyControl]"
    dispatch: "Callable[[], PolicyDispatch]"
    lead_trainer: "Callable[[TrainerContext, float, PartsOf], Role]"
    wanted_series: "Callable[[], WantedSeries]"
    operators: PolicyOperators


def _no_policy(_: "Message") -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Displays:
    """What displays of a run show of a feature.

    ``part``: makes its part of a run's state, by the run's name; ``sections``: names of those that the part adds to a
    snapshot. ``worker_rows``: what a terminal draws of them below the workers, from a snapshot's sections and the cells
    that a name may have. ``policy_in``: the policy that a message on the run's control brings topics of its own for,
    which audits and exports read too.
    """

    part: "Callable[[str], RunPart]"
    sections: tuple[str, ...] = ()
    worker_rows: "Callable[[Mapping[str, Any], int], list[Text]]" = lambda data, name: []
    policy_in: "Callable[[Message], str | None]" = _no_policy


def _no_processes(_: "Settings") -> Sequence[ChildProcess]:
    return ()


def _nothing(_: "Settings") -> None:
    pass


def _no_lines(_: "Settings") -> Sequence[str]:
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
    """What a feature's settings rule out.

    ``check``: raises ``SettingsError`` where sections contradict each other; ``exclusions``: keys that other settings
    make meaningless.
    """

    check: "Callable[[Settings], None]" = _nothing
    exclusions: tuple[ExclusionRule, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FeatureProcesses:
    """The processes of a feature, and what is waited for.

    ``roles``: those that it knows, each with its command; ``started``: those of them that ``streamrl run`` starts with
    these settings. ``standbys``: how many trainers it starts to stand by for the first; ``standby_arguments``: of the
    trainer's command, with which it stands by while another one leads. ``awaited``: what the end of a run waits for.
    """

    roles: tuple[FeatureRole, ...] = ()
    started: "Callable[[Settings], Sequence[ChildProcess]]" = _no_processes
    standbys: "Callable[[Settings], int]" = _zero
    standby_arguments: tuple[str, ...] = ()
    awaited: "Callable[[Settings], LastEvaluation | None]" = _none


@dataclass(frozen=True, kw_only=True)
class StartHooks:
    """What ``streamrl run`` does for a feature before its processes start.

    ``check``: what it looks at before it writes anything, such as a free port; raises ``UserError``. ``try_out`` tries
    what a run will use, such as a user's class; returns what was found in one line, None if there is nothing to try;
    raises ``UserError``. ``lines``: what it prints; ``options``: for all processes of a run, as far as they are known
    only when it starts, such as a free port.
    """

    check: "Callable[[Settings], None]" = _nothing
    try_out: "Callable[[Settings], Coroutine[Any, Any, str | None]]" = _nothing_to_try
    lines: "Callable[[Settings], Sequence[str]]" = _no_lines
    options: "Callable[[Settings], Sequence[str]]" = _no_lines


@dataclass(frozen=True, kw_only=True)
class LoopHooks:
    """What the roles of the core ask of a feature.

    ``predictors``: of output length, by their name in the settings. ``takes_samples``: whether samples go to this
    feature's processes first, before they reach the trainer. ``sending``: how weights come into engines without files.
    ``side_work``: what workers do for it besides their orders; ``asks_for_schemas``: whether their engines have to keep
    to JSON schemas for it. ``endpoint``: where it answers requests to the policy. ``policies``: what is asked where
    several policies may share the stream.
    """

    predictors: "Mapping[str, OpenPredictor]" = field(default_factory=dict)
    takes_samples: "Callable[[Settings], bool]" = _no
    sending: "Callable[[Settings], Sending | None]" = _none
    side_work: "Callable[[Settings], SideWorkFactory | None]" = _none
    asks_for_schemas: "Callable[[Settings], bool]" = _no
    endpoint: "Callable[[Settings], OwnEndpoint | None]" = _none
    policies: "PolicyHooks | None" = None


@dataclass(frozen=True, kw_only=True)
class Feature:
    """What an optional feature brings; what is left out it does not have.

    Args:
        name: of the feature, in plain words.
        settings: what its settings rule out.
        processes: what it starts, and what is waited for.
        start: what ``streamrl run`` does for it before its processes start.
        loop: what the roles of the core ask.
        displays: what displays show of it.
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


def first_of(brought: "Callable[[Feature], T | None]") -> "T | None":
    """What the first feature brings that brings any of it; None: none does."""
    return next((found for feature in features() if (found := brought(feature)) is not None), None)


def policy_hooks() -> PolicyHooks | None:
    """What changes where several policies may share the stream; None: there is always one."""
    return first_of(lambda feature: feature.loop.policies)


def policy_dispatch() -> "Callable[[], PolicyDispatch]":
    """What dispatcher and evaluator ask about policies."""
    from streamrl.producers.dispatch.policies import OnePolicyDispatch

    hooks = policy_hooks()
    return OnePolicyDispatch if hooks is None else hooks.dispatch


def wanted_series() -> "Callable[[], WantedSeries]":
    """What workers and relays ask about series of weights."""
    from streamrl.weights.series import OwnSeries

    hooks = policy_hooks()
    return OwnSeries if hooks is None else hooks.wanted_series


def policy_operators() -> PolicyOperators:
    """What an operator does about several policies.

    Raises:
        UserError: the feature is not in this tree.
    """
    if (hooks := policy_hooks()) is None:
        raise UserError("expected the feature of several policies on one stream, got a tree without it")
    return hooks.operators


def displays() -> tuple[Displays, ...]:
    """What features show on displays."""
    return tuple(each.displays for each in features() if each.displays is not None)


def run_parts(run: str) -> "tuple[RunPart, ...]":
    """What features add to a run's state."""
    return tuple(display.part(run) for display in displays())


def feature_sections() -> tuple[str, ...]:
    """Names of the sections that features add to a snapshot."""
    return tuple(name for display in displays() for name in display.sections)


def standbys(settings: "Settings") -> int:
    """Trainers that stand by for the first."""
    return sum(feature.processes.standbys(settings) for feature in features())


def standby_arguments() -> tuple[str, ...]:
    """Of the trainer's command, with which it stands by; none: no trainer can."""
    return next((each.processes.standby_arguments for each in features() if each.processes.standby_arguments), ())


def predictors() -> "dict[str, OpenPredictor]":
    """The predictors of output length that features bring, by name."""
    return {name: made for feature in features() for name, made in feature.loop.predictors.items()}


def metric_families() -> "tuple[Family, ...]":
    """Every metric that processes of this tree export."""
    from streamrl.observability.metrics.families import CORE_FAMILIES

    return (*CORE_FAMILIES, *(family for feature in features() for family in feature.families()))


def awaited(settings: "Settings") -> "LastEvaluation | None":
    """What the end of the run waits for; if there is any, there are evaluations on its topics."""
    return first_of(lambda feature: feature.processes.awaited(settings))


def feature_role(name: str) -> FeatureRole | None:
    """The role of that name, if a feature has it."""
    return next((role for feature in features() for role in feature.processes.roles if role.name == name), None)
