"""Prompts from a table, shuffled anew in every pass. Memory: about 16 bytes a row, whatever the rows hold."""

import random
from array import array

from producers.prompts.entries import make_prompt
from producers.prompts.filtering import load_filter
from producers.prompts.rows.columns import column_map
from producers.prompts.rows.opening import open_table
from producers.prompts.settings import DataSettings
from schemas.errors import DataError
from schemas.messages.prompts import Prompt


class StoredSource:
    """Every row is read once at the start, so that a malformed one ends the run before it begins.

    Prompts are named by their line or row, so a name stays the same whatever the seed and the filter are.
    """

    def __init__(self, settings: DataSettings, path: str, seed: int) -> None:
        self._settings = settings
        self._seed = seed
        self._map = column_map(settings)
        self._table = open_table(settings, path)
        self._kept = self._accepted()
        self._shuffled: tuple[int, array[int]] = (-1, array("Q"))

    def __len__(self) -> int:
        return len(self._kept)

    def prompt_at(self, position: int) -> tuple[Prompt, int]:
        """The prompt at a position, and the pass over the table it belongs to.

        Raises:
            DataError: the table changed since it was opened, or the prompt is too large.
        """
        data_pass, place = divmod(position, len(self._kept))
        index = self._order_of(data_pass)[place]
        where = self._table.where(index)
        content, columns = self._map.parted(self._table.read(index), where)
        prompt = make_prompt(
            self._settings,
            dataset=self._table.name,
            index=self._table.number(index),
            content=content,
            columns=columns,
            where=where,
        )
        return prompt, data_pass

    def _accepted(self) -> "array[int]":
        accepts = load_filter(self._settings.filter)
        needed = self._map.read if self._settings.filter is None else None
        kept = array("Q")
        for index, row in enumerate(self._table.scan(needed)):
            content, columns = self._map.parted(row, self._table.where(index))
            if accepts({**columns, "prompt": content}):
                kept.append(index)
        if not kept:
            raise DataError(
                f"expected at least one prompt in {self._settings.path} that the filter accepts, "
                f"got none among {len(self._table)} rows"
            )
        return kept

    def _order_of(self, data_pass: int) -> "array[int]":
        if self._shuffled[0] != data_pass:
            order = array("Q", self._kept)
            random.Random(f"{self._seed}/{data_pass}").shuffle(order)
            self._shuffled = (data_pass, order)
        return self._shuffled[1]
