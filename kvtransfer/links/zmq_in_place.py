"""A ZMQ frame that is filled where it lies, so that a payload is copied once on its way out.

pyzmq can copy a buffer into a frame, or lend ZMQ the buffer and wake a thread of Python for each one that comes back.
libzmq's C interface, which pyzmq calls too, can also make a frame of a size and say where its bytes are.
"""

import ctypes
import importlib
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

_SIZE_OF_MESSAGE = 64
"""`zmq_msg_t`, in all versions of ZMQ 4."""

# Symbols of libzmq are found through the extension module that is linked with it, wherever that has its copy.
_lib = ctypes.CDLL(importlib.import_module(zmq.backend.Frame.__module__).__file__, use_errno=True)
_lib.zmq_msg_init_size.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_lib.zmq_msg_data.argtypes = (ctypes.c_void_p,)
_lib.zmq_msg_data.restype = ctypes.c_void_p
_lib.zmq_msg_send.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
_lib.zmq_msg_close.argtypes = (ctypes.c_void_p,)


class _Message:
    """A `zmq_msg_t`, closed with this object unless ZMQ has taken it."""

    def __init__(self, num_bytes: int) -> None:
        self.content = ctypes.create_string_buffer(_SIZE_OF_MESSAGE)
        self.is_ours = _lib.zmq_msg_init_size(self.content, num_bytes) == 0
        if not self.is_ours:
            raise MemoryError(f"no memory for a message of {num_bytes} bytes")

    def __del__(self) -> None:
        if self.is_ours:
            _lib.zmq_msg_close(self.content)


class FrameInPlace:
    """To be filled through `array`, and sent once."""

    def __init__(self, num_bytes: int) -> None:
        """Raises MemoryError."""
        self._message = _Message(num_bytes)
        memory: Any = (ctypes.c_uint8 * num_bytes).from_address(_lib.zmq_msg_data(self._message.content))
        memory.message = self._message  # which lives as long as somebody may look at its bytes
        self.array: NDArray[np.uint8] = np.ctypeslib.as_array(memory)
        """Its bytes; not to be touched any more once it is sent."""

    def send(self, socket: zmq.Socket[bytes]) -> None:
        """As the last frame of a message. Raises ZMQError; the frame can be sent again then."""
        if _lib.zmq_msg_send(self._message.content, socket.underlying, 0) < 0:
            error = ctypes.get_errno()
            raise zmq.Again(error) if error == zmq.EAGAIN else zmq.ZMQError(error)
        self._message.is_ours = False
