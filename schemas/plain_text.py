"""Makes untrusted text safe to print on a terminal. Pure.

Prompts, completions, ids and errors come from models, data sets and anyone who can write to a topic. Printed raw, they
could move the cursor, hide lines, set the window's title or reverse the order of letters.

Invariant printed_text_cannot_control_the_terminal: text from these functions has no control character of C0 or C1, no
escape sequence, no bidirectional override and no other character without a width.
"""

import json
from collections.abc import Iterable


def plain_text(text: str, keep: str = "") -> str:
    """The text with unprintable characters escaped as in a Python string, except the characters in ``keep``."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode() for each in text
    )


def plain_lines(lines: Iterable[str]) -> str:
    """Escaped lines, joined for printing. Each line stays one line."""
    return "\n".join(map(plain_text, lines))


def plain_json(text: str) -> str:
    """JSON with unprintable characters as JSON escapes, so that its meaning stays the same."""
    if text.isprintable():
        return text
    # Outside strings, the only unprintable characters in JSON are white space between its parts.
    return "".join(each if each.isprintable() or each in "\n\t" else json.dumps(each)[1:-1] for each in text)
