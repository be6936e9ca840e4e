"""The base class of all messages: frozen, tolerant of a newer writer's fields, with arrays compared by value.

An array field is one-dimensional, numpy in memory and little-endian bytes on the wire. A long text is a ``str`` in
memory and UTF-8 after the arrays on the wire.
"""

from typing import Annotated, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, PlainSerializer, PlainValidator, WithJsonSchema

from streamrl.schemas.errors import WireVersionError

WIRE_VERSION = 1
"""Version of everything that processes send to each other.

A release raises it if its writers send something that the release before does not know: a kind of message, an enum
value or a schema version.
"""


def is_compatible_wire_version(wire: int) -> bool:
    """Whether this process may work with one of wire version ``wire``: the same, the one before or the one after."""
    return abs(wire - WIRE_VERSION) <= 1


def check_wire_version(who: str, wire: int) -> None:
    """Refuse a process whose wire version is too far from this process's.

    Raises:
        WireVersionError: the wire versions differ by more than one.
    """
    if is_compatible_wire_version(wire):
        return
    older = "this process" if wire > WIRE_VERSION else who
    raise WireVersionError(
        f"expected {who} to speak wire version {max(1, WIRE_VERSION - 1)} to {WIRE_VERSION + 1}, since this process "
        f"speaks {WIRE_VERSION}, got {wire}: update {older}; in a live run, update one version at a time"
    )


class Message(BaseModel):
    """A record that travels on a topic. ``SCHEMA`` and ``VERSION`` go into the record's headers.

    A new version may only add optional fields; a newer writer's unknown fields are ignored. Readers support a new
    version one release before writers use it.
    """

    SCHEMA: ClassVar[str]
    VERSION: ClassVar[int] = 1
    MAX_BYTES: ClassVar[int] = 1 << 20

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    @classmethod
    def array_fields(cls) -> dict[str, np.dtype[Any]]:
        """Names and dtypes of the fields that travel as raw bytes after the header."""
        # ``__dict__`` and not ``getattr``: ``getattr`` would find the cache of a base class, which has other fields.
        cached: dict[str, np.dtype[Any]] | None = cls.__dict__.get("_array_fields_cache")
        if cached is None:
            cached = {
                name: marker.dtype
                for name, field in cls.model_fields.items()
                for marker in field.metadata
                if isinstance(marker, WireArray)
            }
            type.__setattr__(cls, "_array_fields_cache", cached)
        return cached

    @classmethod
    def text_fields(cls) -> tuple[str, ...]:
        """Names of the fields that travel as UTF-8 after the arrays."""
        return tuple(
            name
            for name, field in cls.model_fields.items()
            if any(isinstance(marker, WireText) for marker in field.metadata)
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        # pydantic's own comparison would take the truth value of an array, which numpy refuses.
        arrays = self.array_fields()
        return all(
            np.array_equal(getattr(self, name), getattr(other, name))
            if name in arrays
            else getattr(self, name) == getattr(other, name)
            for name in type(self).model_fields
        )

    __hash__ = None  # type: ignore[assignment]

    def replace(self, **changes: Any) -> Self:
        """A validated copy with some fields changed."""
        return type(self).model_validate({**self.__dict__, **changes})


class WireArray:
    """Marks a field as an array that travels after the frame's header; holds its dtype."""

    def __init__(self, dtype: str) -> None:
        self.dtype = np.dtype(dtype)

    def validate(self, value: Any) -> NDArray[Any]:
        """Accept an array of exactly this dtype, or a sequence of numbers.

        Raises:
            ValueError: wrong dtype, or not one-dimensional.
        """
        if not isinstance(value, np.ndarray):
            value = np.asarray(value, dtype=self.dtype)
        array: NDArray[Any] = value
        # Refused and not converted: a wrong dtype is the writer's mistake, and a conversion could lose digits.
        if array.dtype != self.dtype or array.ndim != 1:
            raise ValueError(f"expected a 1-d array of {self.dtype}, got {array.ndim}-d {array.dtype}")
        return array


class WireText:
    """Marks a text that grows with a completion. It travels after the arrays, outside the header's size limit."""


def _array_type(dtype: str) -> Any:
    marker = WireArray(dtype)
    return (
        marker,
        PlainValidator(marker.validate),
        PlainSerializer(lambda array: array.tolist(), when_used="json"),
        WithJsonSchema({"type": "array", "items": {"type": "number"}}),
    )


Int32Array = Annotated[NDArray[np.int32], *_array_type("<i4")]
Float32Array = Annotated[NDArray[np.float32], *_array_type("<f4")]
UInt8Array = Annotated[NDArray[np.uint8], *_array_type("<u1")]
LongText = Annotated[str, WireText()]
