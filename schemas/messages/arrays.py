"""Typed one-dimensional arrays as message fields: numpy in memory, little-endian bytes on the wire."""

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import PlainSerializer, PlainValidator, WithJsonSchema


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
        if array.dtype != self.dtype or array.ndim != 1:
            raise ValueError(f"expected a 1-d array of {self.dtype}, got {array.ndim}-d {array.dtype}")
        return array


def _field(dtype: str) -> Any:
    marker = WireArray(dtype)
    return (
        marker,
        PlainValidator(marker.validate),
        PlainSerializer(lambda array: array.tolist(), when_used="json"),
        WithJsonSchema({"type": "array", "items": {"type": "number"}}),
    )


Int32Array = Annotated[NDArray[np.int32], *_field("<i4")]
Float32Array = Annotated[NDArray[np.float32], *_field("<f4")]
UInt8Array = Annotated[NDArray[np.uint8], *_field("<u1")]
