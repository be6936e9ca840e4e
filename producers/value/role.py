"""Values of prompts as a feature: the dispatcher orders prompts less often whose groups would have no advantage."""

from typing import TYPE_CHECKING, Any

from streamrl.settings.features import ExclusionRule, Feature, LoopHooks, SettingsRules

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamrl.producers.dispatch.choosing import PromptChooser
    from streamrl.producers.value.settings import ValuedDispatch
    from streamrl.settings.tree import Settings


def _dispatch_of(settings: "Settings") -> "ValuedDispatch":
    from streamrl.producers.value.settings import ValuedDispatch

    return settings.section(ValuedDispatch)


def _is_on(settings: "Settings") -> bool:
    return _dispatch_of(settings).value


def _completed(tree: "dict[str, Any]") -> "dict[str, Any]":
    """The tree with ``dispatch.value`` on if the trainer discards groups without advantage, unless it is set."""
    from streamrl.consumers.algorithms.settings import PRESETS

    dispatch, algorithm = tree.get("dispatch", {}), tree.get("algorithm", {})
    if not isinstance(dispatch, dict) or not isinstance(algorithm, dict) or "value" in dispatch:
        return tree
    preset = PRESETS.get(algorithm.get("name", "grpo"), {})
    if (preset | algorithm).get("dynamic_sampling") is not True:
        return tree
    return tree | {"dispatch": dispatch | {"value": True}}


def _chooser(settings: "Settings") -> "Callable[[], PromptChooser] | None":
    from streamrl.producers.value.chooser import ValuedPrompts

    if not _is_on(settings):
        return None
    weights, loop, seed = settings.rewards.weight_by_name, settings.loop, settings.run.seed
    history = _dispatch_of(settings).value_history
    return lambda: ValuedPrompts(weights, loop.num_generations, seed, history)


FEATURE = Feature(
    name="values of prompts",
    settings=SettingsRules(
        complete=_completed,
        exclusions=(
            ExclusionRule(
                ("dispatch.value_history",),
                ("dispatch.value",),
                _is_on,
                lambda _: "dispatch.value is off, so every prompt is ordered",
            ),
        ),
    ),
    loop=LoopHooks(chooser=_chooser),
)
