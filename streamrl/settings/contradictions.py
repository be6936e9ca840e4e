"""Finds settings that other settings make meaningless. They are refused if the user gives both, and never written.

Invariant derived_settings_are_refused: a value that follows from other settings cannot be set together with them. A
later layer overrides an earlier one: ``--loop.mode synchronous`` is allowed with a file that sets ``max_staleness``.
"""

from collections.abc import Iterable

from streamrl.consumers.algorithms.settings import (
    BY_RETURNS,
    PAIRWISE,
    CriticSettings,
    PreferenceSettings,
    SelectionSettings,
    TeacherSettings,
    is_import_path,
)
from streamrl.producers.rewards.judges import CODE_TESTS, LLM_JUDGE
from streamrl.schemas.errors import SettingsError
from streamrl.schemas.identifiers import SERVED_POLICY
from streamrl.settings.features import ExclusionRule, features
from streamrl.settings.layers import SettingsLayers
from streamrl.settings.tree import Settings

_OF_THE_JUDGE = ("base_url", "model", "prompt")


def _functions(settings: Settings) -> set[str]:
    return set(settings.rewards.functions)


def _has_choice(settings: Settings) -> bool:
    """Whether the trainer may choose among several waiting groups for a step."""
    return settings.loop.mode == "trajectory_async" and settings.run.instance == SERVED_POLICY


def _no_choice(settings: Settings) -> str:
    if settings.run.instance != SERVED_POLICY:
        return f'run.instance = "{settings.run.instance}" (only the served trainer can choose groups)'
    return f'loop.mode = "{settings.loop.mode}", in which steps cannot choose groups'


_OWN_SECTIONS: tuple[tuple[str, Iterable[str], frozenset[str]], ...] = (
    ("critic", set(CriticSettings.model_fields) - {"gamma"}, frozenset({"ppo"})),
    ("critic", ("gamma",), BY_RETURNS),
    ("preference", PreferenceSettings.model_fields, PAIRWISE),
    ("selection", SelectionSettings.model_fields, frozenset({"rft"})),
    ("teacher", TeacherSettings.model_fields, frozenset({"distillation"})),
)
"""Sections of ``[algorithm]``, each with keys and the algorithms that read them."""


def _read_by(section: str, keys: Iterable[str], names: frozenset[str]) -> ExclusionRule:
    """A rule for settings of ``[algorithm]`` that only some algorithms read; a user's own algorithm may read any."""
    return ExclusionRule(
        tuple(f"algorithm.{section}.{key}" for key in keys),
        ("algorithm.name",),
        lambda settings: settings.algorithm.name in names or is_import_path(settings.algorithm.name),
        lambda settings: f'algorithm.name = "{settings.algorithm.name}"',
    )


RULES = (
    ExclusionRule(
        ("loop.max_staleness",),
        ("loop.mode",),
        lambda settings: settings.loop.mode == "trajectory_async",
        lambda settings: f'loop.mode = "{settings.loop.mode}", whose bound is {settings.loop.staleness_bound}',
    ),
    ExclusionRule(
        ("ingest.sampling",),
        ("loop.mode", "run.instance"),
        lambda settings: settings.ingest.sampling == "oldest" or _has_choice(settings),
        lambda settings: _no_choice(settings),
    ),
    ExclusionRule(
        ("ingest.staleness_cap",),
        ("ingest.sampling", "loop.max_staleness"),
        lambda settings: (
            settings.ingest.staleness_cap is None
            or (settings.ingest.sampling == "capped" and settings.ingest.staleness_cap < settings.loop.staleness_bound)
        ),
        lambda settings: (
            f'ingest.sampling = "{settings.ingest.sampling}" and a staleness bound of {settings.loop.staleness_bound} '
            "(capped and a larger bound are needed)"
        ),
    ),
    ExclusionRule(
        ("ingest.passed_over",),
        ("ingest.sampling",),
        lambda settings: settings.ingest.passes_over,
        lambda settings: f'ingest.sampling = "{settings.ingest.sampling}", which passes over no group',
    ),
    ExclusionRule(
        ("loop.include_stop_str_in_output",),
        ("loop.stop",),
        lambda settings: bool(settings.loop.stop),
        lambda _: "no loop.stop",
    ),
    ExclusionRule(
        ("dispatch.repack",),
        ("generation.partial_trajectories", "generation.adopt"),
        lambda settings: (
            not settings.dispatch.repack
            or (settings.generation.partial_trajectories, settings.generation.adopt) == ("durable", "idle")
        ),
        lambda settings: (
            f'generation.partial_trajectories = "{settings.generation.partial_trajectories}" and '
            f'generation.adopt = "{settings.generation.adopt}" (durable and idle are needed)'
        ),
    ),
    ExclusionRule(
        ("data.subset", "data.split", "data.format", "data.prompt_column", "data.answer_column"),
        ("data.path", "data.dataset", "data.mixture"),
        lambda settings: settings.data.path is not None,
        lambda _: "generated prompts (data.dataset or data.mixture)",
    ),
    ExclusionRule(
        ("rewards.format_pattern",),
        ("rewards.functions",),
        lambda settings: "format" in _functions(settings),
        lambda _: 'rewards.functions that lack "format"',
    ),
    ExclusionRule(
        ("rewards.answer_pattern",),
        ("rewards.functions",),
        lambda settings: bool(_functions(settings) & {"math_verify", "exact_match"}),
        lambda _: 'rewards.functions that lack "math_verify" and "exact_match"',
    ),
    ExclusionRule(
        tuple(f"rewards.judge_{key}" for key in _OF_THE_JUDGE),
        ("rewards.functions",),
        lambda settings: LLM_JUDGE in _functions(settings),
        lambda _: f'rewards.functions that lack "{LLM_JUDGE}"',
    ),
    ExclusionRule(
        ("rewards.code_timeout_s", "rewards.code_network"),
        ("rewards.functions",),
        lambda settings: CODE_TESTS in _functions(settings),
        lambda _: f'rewards.functions that lack "{CODE_TESTS}"',
    ),
    ExclusionRule(
        ("algorithm.overlong_l_cache",),
        ("algorithm.overlong_l_max",),
        lambda settings: settings.algorithm.overlong_l_max is not None,
        lambda _: "no algorithm.overlong_l_max, so no overlong penalty",
    ),
    ExclusionRule(
        ("training.attn_implementation",),
        ("training.dtype",),
        lambda settings: settings.training.attn_implementation == "sdpa" or settings.training.dtype == "bfloat16",
        lambda settings: f'training.dtype = "{settings.training.dtype}" (flash attention needs "bfloat16")',
    ),
    ExclusionRule(
        ("training.lora.alpha", "training.lora.target_modules"),
        ("training.lora.rank",),
        lambda settings: settings.training.lora.rank > 0,
        lambda _: "training.lora.rank = 0, so no adapters",
    ),
    *(_read_by(section, keys, names) for section, keys, names in _OWN_SECTIONS),
    ExclusionRule(
        ("algorithm.options",),
        ("algorithm.name",),
        lambda settings: is_import_path(settings.algorithm.name) or not settings.algorithm.options,
        lambda settings: f'algorithm.name = "{settings.algorithm.name}", which has none',
    ),
    ExclusionRule(
        ("kafka.sasl_mechanism", "kafka.sasl_plain_username", "kafka.sasl_plain_password"),
        ("kafka.security_protocol",),
        lambda settings: settings.kafka.security_protocol.startswith("SASL"),
        lambda settings: f'kafka.security_protocol = "{settings.kafka.security_protocol}"',
    ),
    ExclusionRule(
        ("kafka.ssl_cafile", "kafka.ssl_certfile", "kafka.ssl_keyfile", "kafka.ssl_key_password"),
        ("kafka.security_protocol",),
        lambda settings: settings.kafka.security_protocol.endswith("SSL"),
        lambda settings: f'kafka.security_protocol = "{settings.kafka.security_protocol}"',
    ),
)


def _rules() -> tuple[ExclusionRule, ...]:
    return (*RULES, *(rule for feature in features() for rule in feature.settings.exclusions))


def refuse_contradictions(settings: Settings, given: SettingsLayers) -> None:
    """Check the settings that the user gave.

    Raises:
        SettingsError: the user gave a key that settings from the same or an earlier layer make meaningless.
    """
    for rule in _rules():
        if rule.applies(settings):
            continue
        # A decider from a later layer overrides a key from an earlier one; -1: all deciders have their defaults.
        decided = max(given.rank(tuple(key.split("."))) for key in rule.deciders)
        for key in rule.keys:
            path = tuple(key.split("."))
            # At least 0, so that a key which the user did not give (-1) is never refused.
            if given.rank(path) >= max(decided, 0):
                raise SettingsError(
                    f"expected no {key} with {rule.because(settings)}, got one{given.origin(path)}; "
                    "remove one of the two"
                )


def meaningless_keys(settings: Settings) -> frozenset[str]:
    """Keys whose values other settings make meaningless."""
    return frozenset(key for rule in _rules() if not rule.applies(settings) for key in rule.keys)
