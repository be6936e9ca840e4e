import json

from hypothesis import example, given
from hypothesis import strategies as st

from streamrl.schemas.plain_text import plain_json, plain_lines, plain_text

HOSTILE = "a\x1b]0;title\x07\x1b[2J\x9b31m\x7f\u202eb\u2066c\r\n\td\x00\ud800\u200be"


def test_control_characters_are_written_out() -> None:
    shown = plain_text(HOSTILE)
    assert shown.isprintable()
    assert shown == (r"a\x1b]0;title\x07\x1b[2J\x9b31m\x7f\u202eb\u2066c\r\n\td\x00\ud800\u200be")
    assert plain_text("Grüße, 漢字 😀 nothing of it") == "Grüße, 漢字 😀 nothing of it"
    assert plain_text("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\x1b"
    assert plain_lines(["a\nb", "c"]) == "a\\nb\nc"


@given(st.text(st.characters(codec=None)))
@example(HOSTILE)
def test_printed_text_cannot_control_the_terminal(text: str) -> None:
    assert plain_text(text).isprintable()
    encoded = plain_json(json.dumps({"t": text}, ensure_ascii=False))
    assert encoded.isprintable()
    assert json.loads(encoded) == {"t": text}
