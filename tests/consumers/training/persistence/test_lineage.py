from pathlib import Path

import pytest

from consumers.training.persistence.lineage import claim_lineage
from schemas.errors import Superseded


def test_a_lineage_is_given_once(tmp_path: Path) -> None:
    claimed = [claim_lineage(tmp_path, at_least=1, now=0.0).number for _ in range(3)]
    assert claimed == [1, 2, 3]


def test_a_lineage_is_newer_than_the_checkpoint_it_continues(tmp_path: Path) -> None:
    assert claim_lineage(tmp_path, at_least=8, now=0.0).number == 8


def test_the_older_of_two_trainers_is_superseded(tmp_path: Path) -> None:
    older = claim_lineage(tmp_path, at_least=1, now=0.0)
    older.check()
    newer = claim_lineage(tmp_path, at_least=1, now=0.0)
    newer.check()
    with pytest.raises(Superseded, match="expected lineage 1"):
        older.check()
