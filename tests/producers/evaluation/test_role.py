import pytest

from streamrl.producers.grading.settings import GradedRewards
from streamrl.schemas.errors import SettingsError
from streamrl.settings.loading import load_settings


def test_held_out_prompts_and_graders_are_refused_together() -> None:
    graded = [
        *("--data.dataset=chain_sum", "--model.path=m"),
        *('--rewards.functions=["exact_match"]', '--rewards.graded=["exact_match"]'),
    ]
    assert load_settings(None, graded).section(GradedRewards).graded
    with pytest.raises(SettingsError, match="only workers score held-out completions"):
        load_settings(None, [*graded, "--evaluation.data.held_out.dataset=chain_sum"])
