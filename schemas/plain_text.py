"""Text of strangers as a terminal may safely be given it. Pure.

Prompts, completions, ids and errors come from models, data sets and whoever can write to a topic. Printed raw, they
could move the cursor, hide lines, set the window's title, or turn the order of letters around.

Invariant nothing_printed_is_obeyed: what goes through here holds no control character of C0 or C1, no escape sequence,
no bidirectional override and no other character without a width of its own.
"""

import json
from collections.abc import Iterable


def plain_text(text: str, keep: str = "") -> str:
    """With what is not printable written out as in a Python string; characters of ``keep`` stay as they are."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode() for each in text
    )


def plain_lines(lines: Iterable[str]) -> str:
    """Lines to print, each of which stays one."""
    return "\n".join(map(plain_text, lines))


def plain_json(text: str) -> str:
    """JSON with every such character as an escape of JSON's own, so that it still means the same."""
    if text.isprintable():
        return text
    # Outside of strings JSON has no unprintable character but the white space between its parts.
    return "".join(each if each.isprintable() or each in "\n\t" else json.dumps(each)[1:-1] for each in text)
