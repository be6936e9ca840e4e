"""Decodes tokens that arrive one by one, for readers that cannot wait for the last token."""

from collections.abc import Sequence

from streamrl.producers.generation.engines.port import Decode, Tokenizer
from streamrl.schemas.trajectories import SamplingParams

_HELD_TIMES = 8
"""Calls for which an incomplete character is held back: twice the 4 bytes of UTF-8's longest, at a byte a token."""


class IncrementalText:
    """Decodes tokens piece by piece. A token's text may depend on earlier tokens (a space, bytes of one character).

    So a window of tokens is decoded without and with the newest ones. The difference is the new text, and the window
    moves on. ``is_settled``: later tokens do not change the text that ``decode_next`` returned last.
    """

    __slots__ = ("_decode", "_held", "_known", "_new", "_shown", "_whole", "is_settled")

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._known: list[int] = []
        self._shown = 0
        self._new: list[int] = []
        self._held = self._whole = 0
        self.is_settled = True

    def start_after(self, token_ids: Sequence[int]) -> str:
        """Start after existing tokens. Returns the settled part of their text."""
        tokens, decode = list(token_ids), self._decode
        whole = len(tokens)
        # The last tokens may be part of a character: their text changes when the character is complete.
        ends = range(whole, max(-1, whole - _HELD_TIMES), -1)
        settled = next((end for end in ends if not decode(tokens[:end]).endswith("\ufffd")), whole)
        self._known, self._new = tokens[max(0, settled - _HELD_TIMES) : settled], tokens[settled:]
        self._shown = len(decode(self._known))
        self._held = len(self._new)
        self.is_settled = not self._new
        return decode(tokens[:settled])

    def decode_next(self, token_ids: Sequence[int]) -> str:
        """Decode more tokens. Returns the text after the settled text."""
        self._new += token_ids
        piece = self._decode(self._known + self._new)[self._shown :]
        # U+FFFD at the end replaces the bytes of an incomplete character, whose text will change. If several tokens
        # arrive at a time, each batch may end within another character; the characters before are complete.
        whole = len(piece.rstrip("\ufffd"))
        self._held = 1 if whole > self._whole else self._held + 1
        self._whole = whole
        self.is_settled = self._held >= _HELD_TIMES or bool(piece and not piece.endswith("\ufffd"))
        if self.is_settled:
            self._held = self._whole = 0
            self._known, self._new = self._new, []
            self._shown = len(self._decode(self._known))
        return piece


class StopMatcher:
    """Finds the first stop string in a completion that grows token by token; shared by all decoders."""

    __slots__ = ("_decode", "_overlap", "_sampling", "_seen", "_tail", "_text")

    def __init__(self, sampling: SamplingParams, tokenizer: Tokenizer) -> None:
        self._sampling = sampling
        self._decode = tokenizer.decoder_for(sampling)
        self._text = IncrementalText(self._decode)
        # Characters that may be the start of a stop string: all but its last one.
        self._overlap = max(len(one) for one in sampling.stop) - 1
        self._tail = ""
        self._seen = 0

    def start_after(self, prefix: Sequence[int]) -> bool:
        """Start after tokens that were sampled before; whether they contain a stop string."""
        self._seen = len(prefix)
        text = self._text.start_after(prefix)
        self._tail = text[max(0, len(text) - self._overlap) :]
        return self._sampling.find_stop(self._decode(list(prefix))) is not None

    def is_complete(self, generated: int, newest: Sequence[int]) -> bool:
        """Read a completion's new tokens; whether they complete a stop string.

        ``generated``: number of all its tokens. ``newest``: the last tokens, including all new ones.
        """
        grown = generated - self._seen
        if not grown:
            return False
        self._seen = generated
        text = self._tail + self._text.decode_next(newest[-grown:])
        if self._sampling.find_stop(text) is not None:
            return True
        if self._text.is_settled:
            self._tail = text[max(0, len(text) - self._overlap) :]
        return False
