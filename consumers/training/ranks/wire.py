"""Messages between rank 0 and another rank of its machine: JSON and arrays, over a pair of sockets.

A message is two lengths in bytes (uint32, uint64, little-endian), the JSON, and the arrays' bytes in the order in which
the JSON lists them. Nothing is pickled: reading a message runs no code.
"""

import json
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LENGTHS = struct.Struct("<IQ")
_ARRAYS = "arrays"

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class RankMessage:
    """A message. ``word``: the act to do, or its result; ``values``: plain JSON."""

    word: str
    values: dict[str, Any] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)


class Wire:
    """One end of the pair of sockets. One thread may send while another receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @property
    def descriptor(self) -> int:
        """The socket's file descriptor, for a process to inherit."""
        return self._end.fileno()

    def send(self, message: RankMessage) -> None:
        """Send a complete message.

        Raises:
            OSError: the other end is gone.
        """
        arrays = {name: np.ascontiguousarray(array) for name, array in message.arrays.items()}
        listed = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
        head = json.dumps({"word": message.word, "values": message.values, _ARRAYS: listed}).encode()
        self._end.sendall(_LENGTHS.pack(len(head), sum(array.nbytes for array in arrays.values())) + head)
        for array in arrays.values():
            if array.nbytes:
                self._end.sendall(array.reshape(-1).data.cast("B"))

    def receive(self) -> RankMessage | None:
        """The next message; None once the other end is gone."""
        lengths = self._exactly(_LENGTHS.size)
        if lengths is None:
            return None
        head_size, body_size = _LENGTHS.unpack(lengths)
        head, body = self._exactly(head_size), self._exactly(body_size)
        if head is None or body is None:
            return None
        fields = json.loads(head)
        arrays: dict[str, NDArray[Any]] = {}
        offset = 0
        for name, dtype, shape in fields[_ARRAYS]:
            count = int(np.prod(shape, dtype=np.int64))
            # Sliced, because ``frombuffer`` refuses an offset at the very end, where an empty array may be.
            arrays[name] = (
                np.frombuffer(memoryview(body)[offset:], dtype, count).reshape(shape)
                if count
                else np.zeros(shape, dtype)
            )
            offset += arrays[name].nbytes
        return RankMessage(fields["word"], fields["values"], arrays)

    def close(self) -> None:
        """Close this end, which the other end notices."""
        with suppress(OSError):  # it may be gone already
            self._end.shutdown(socket.SHUT_RDWR)  # also wakes a thread of this process that receives
        self._end.close()

    def _exactly(self, size: int) -> bytearray | None:
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            try:
                count = self._end.recv_into(view[got:])
            except OSError:
                return None
            if not count:
                return None
            got += count
        return data
