"""Held-out sets as inputs of a run."""

from pathlib import Path

from streamrl.deploy.local.inputs import inputs_of, task_of
from streamrl.settings.loading import validated


def test_a_changed_held_out_set_is_noticed_and_changes_no_trajectory(tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "1+2", "answer": "3"}\n')
    settings = validated(
        {
            "data": {"path": str(held_out)},
            "model": {"path": str(tmp_path)},
            "rewards": {"functions": ["exact_match"]},
            "evaluation": {"data": {"riddles": {"path": str(held_out)}}},
        }
    )
    before = inputs_of(settings)
    held_out.write_text('{"prompt": "1+2", "answer": "4"}\n')
    after = inputs_of(settings)
    name = "held-out set riddles"
    fingerprints = [{each.name: each.fingerprint for each in found} for found in (before, after)]
    assert None not in (fingerprints[0][name], fingerprints[1][name])
    assert fingerprints[0][name] != fingerprints[1][name]
    assert not {each.name for each in after if not each.shapes_trajectories} & task_of(settings, after).keys()
