import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.inspection.diagnostics.filters import ABSENT, parse_filter
from streamrl.schemas.errors import UserError
from streamrl.schemas.identifiers import PolicyVersion

RECORD = {
    "worker_id": "worker-1",
    "length": 512,
    "reward": 0.5,
    "finish_reason": "length",
    "version": PolicyVersion(2, 20),
    "finished": False,
    "detail": None,
    "group_ids": ("gsm8k/7/0", "gsm8k/8/0"),
}


def accepts(text: str) -> bool:
    return parse_filter(text).accepts(lambda name: RECORD.get(name, ABSENT))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("worker_id=worker-1 and length>500", True),
        ("worker_id=worker-1 and length>512", False),
        ("worker_id==worker-1 AND length>=512 and length<=512.0", True),
        ("worker_id='worker-1'", True),
        ('worker_id!="worker-1" or reward<0.6', True),
        ("not (worker_id=worker-2 or length<10)", True),
        ("not finish_reason=length", False),
        ("worker_id~^worker-\\d$ and worker_id!~2", True),
        ("version=20 and version=2-20 and version>1-99 and version<21", True),
        ("version>2-20", False),
        ("finished=false and detail=none", True),
        ("group_ids=gsm8k/8/0 and group_ids!=gsm8k/9/0", True),
        ("missing=1 or missing>1 or missing~.", False),
        ("missing!=1", True),
        ("length=abc", False),
        ("a=1 or worker_id=worker-1 and length=512", True),
    ],
)
def test_an_expression_accepts_what_it_says(text: str, expected: bool) -> None:
    assert accepts(text) is expected


def test_the_fields_of_an_expression_are_known() -> None:
    assert parse_filter("a=1 and (b.c>2 or a=3)").fields == ("a", "b.c")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected a field"),
        ("length", "expected an operator"),
        ("length>", "expected a value after 'length'"),
        ("length>5 worker", "expected 'and', 'or' or the end"),
        ("(length>5", r"expected '\)'"),
        ("length>5 or", "expected a field"),
        ("worker_id='x", "unclosed quote at character 11"),
        ("worker_id~[", "regular expression"),
        ("(" * 60 + "a=1", "at most 50 levels"),
    ],
)
def test_an_invalid_filter_is_refused_with_what_was_expected(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_filter(text)


@pytest.mark.parametrize("text", ["length>abc", "version<x"])
def test_sizes_are_only_compared_with_sizes(text: str) -> None:
    with pytest.raises(UserError, match="expected a"):
        accepts(text)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab1=<>!~()'\" and or not\\[", max_size=40))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    with contextlib.suppress(UserError):
        accepts(text)
