import json
import math
from dataclasses import dataclass

import numpy as np

from streamrl.inspection.replay.view import as_json, columns, number
from streamrl.schemas.identifiers import PolicyVersion


@dataclass(frozen=True)
class Thing:
    version: PolicyVersion
    values: tuple[float, ...]
    verdict: str = "fine"


def test_infinite_numbers_become_text() -> None:
    thing = Thing(PolicyVersion(1, 2), (1.5, math.inf, -math.inf, math.nan))
    assert json.loads(as_json({"thing": thing, "array": np.array([1, 2], dtype="<i4")})) == {
        "thing": {"version": [1, 2], "values": [1.5, "inf", "-inf", "nan"], "verdict": "fine"},
        "array": [1, 2],
    }


def test_columns_are_aligned() -> None:
    assert columns(("name", "n"), [("a", "1"), ("long one", "22")]) == ["name       n", "a          1", "long one  22"]


def test_numbers_are_short() -> None:
    assert (number(None), number(1 / 3), number(math.inf)) == ("-", "0.333333", "inf")
