"""The text of tokens that come one by one, for whoever cannot wait for the last of them."""

from collections.abc import Sequence

from streamrl.producers.generation.engines.port import Tokenizer
from streamrl.schemas.trajectories import SamplingParams

_HELD_TIMES = 8
"""How often a character's rest is waited for: UTF-8 has at most 4 bytes in one, and a token at least one."""


class IncrementalText:
    """What a token adds to the text may depend on those before it (a space, the bytes of one character).

    So a window of tokens is decoded without and with the newest ones: what the text is longer by is new, and the window
    moves on. ``is_settled``: nothing that comes changes what ``decode_next`` returned last.
    """

    __slots__ = ("_held", "_known", "_new", "_shown", "_tokenizer", "_whole", "is_settled")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: list[int] = []
        self._shown = 0
        self._new: list[int] = []
        self._held = self._whole = 0
        self.is_settled = True

    def go_on_behind(self, token_ids: Sequence[int]) -> str:
        """Begin behind tokens that there are already; the text of those that are settled."""
        tokens, decode = list(token_ids), self._tokenizer.decode
        whole = len(tokens)
        # The last tokens may be part of a character: their text is another once it is whole.
        ends = range(whole, max(-1, whole - _HELD_TIMES), -1)
        settled = next((end for end in ends if not decode(tokens[:end]).endswith("\ufffd")), whole)
        self._known, self._new = tokens[max(0, settled - _HELD_TIMES) : settled], tokens[settled:]
        self._shown = len(decode(self._known))
        self._held = len(self._new)
        self.is_settled = not self._new
        return decode(tokens[:settled])

    def decode_next(self, token_ids: Sequence[int]) -> str:
        """Take in tokens; the text behind what was settled before."""
        self._new += token_ids
        piece = self._tokenizer.decode(self._known + self._new)[self._shown :]
        # U+FFFD at the end: bytes of a character that is not whole yet, and will be another text then. Where tokens
        # come several at a time, each lot may end within another one, and those before it are whole.
        whole = len(piece.rstrip("\ufffd"))
        self._held = 1 if whole > self._whole else self._held + 1
        self._whole = whole
        self.is_settled = self._held >= _HELD_TIMES or bool(piece and not piece.endswith("\ufffd"))
        if self.is_settled:
            self._held = self._whole = 0
            self._known, self._new = self._new, []
            self._shown = len(self._tokenizer.decode(self._known))
        return piece


class StopMatcher:
    """Whether a completion that grows by a token contains one of its stop strings by now; for all decoders alike."""

    __slots__ = ("_decode", "_grown", "_overlap", "_sampling", "_seen", "_tail")

    def __init__(self, sampling: SamplingParams, tokenizer: Tokenizer) -> None:
        self._sampling = sampling
        self._decode = tokenizer.decode
        self._grown = IncrementalText(tokenizer)
        # Text that may be the beginning of a stop string: all but its last character.
        self._overlap = max(len(one) for one in sampling.stop) - 1
        self._tail = ""
        self._seen = 0

    def go_on_behind(self, prefix: Sequence[int]) -> bool:
        """Take in what was sampled before; whether a stop string is in it."""
        self._seen = len(prefix)
        text = self._grown.go_on_behind(prefix)
        self._tail = text[max(0, len(text) - self._overlap) :]
        return self._sampling.find_stop(self._decode(list(prefix))) is not None

    def is_complete(self, generated: int, newest: Sequence[int]) -> bool:
        """Take in what a completion has grown by, a token a decode step; whether a stop string ends there.

        ``generated`` counts all of its tokens, of which ``newest`` are the last ones, the new ones among them.
        """
        grown = generated - self._seen
        if not grown:
            return False
        self._seen = generated
        text = self._tail + self._grown.decode_next(newest[-grown:])
        if self._sampling.find_stop(text) is not None:
            return True
        if self._grown.is_settled:
            self._tail = text[max(0, len(text) - self._overlap) :]
        return False
