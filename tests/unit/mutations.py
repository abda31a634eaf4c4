"""Frames that are almost messages: one value changed, one missing, one too many, cut short, a byte turned, or noise."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st

NASTY: tuple[Any, ...] = (
    None, True, -1, 0, 1, 1 << 31, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63), 0.5,
    math.inf, -math.inf, math.nan, "", "x", "é" * 100, "\0", b"", b"\0" * 300, [], {}, [[]], [1, 2], ["x"] * 5,
    [-1], [1 << 63], {"x": 1}, {"x": "y"}, [None] * 50,
)  # fmt: skip

DEEP = b"\x91" * 20_000 + b"\xc0"
"""Lists in lists, too deep for any reader."""

Path = tuple[Any, ...]


def _paths(tree: Any, path: Path = ()) -> list[Path]:
    """Of every value in it, and of the whole."""
    if isinstance(tree, dict):
        inner = [found for key, value in tree.items() for found in _paths(value, (*path, key))]
    elif isinstance(tree, list):
        inner = [found for index, value in enumerate(tree) for found in _paths(value, (*path, index))]
    else:
        inner = []
    return [path, *inner]


def _with(tree: Any, path: Path, change: Any) -> Any:
    """A copy with the value at `path` replaced by `change(value)`; taken out where that is `...`."""
    if not path:
        return change(tree)
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    value = _with(copy[path[0]], path[1:], change)
    if value is ...:
        del copy[path[0]]
    else:
        copy[path[0]] = value
    return copy


def _nasty(value: Any, number: int, keeps_type: bool) -> Any:
    alike = [other for other in NASTY if type(other) is type(value)]
    others = alike if alike and keeps_type else NASTY
    return others[number % len(others)]


@st.composite
def mutated(draw: st.DrawFn, valid: Sequence[msgspec.Struct]) -> bytes:
    """A frame made of one of these messages. Some are still valid."""
    tree = msgspec.msgpack.decode(msgspec.msgpack.encode(draw(st.sampled_from(valid))))
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(_paths(tree)))
        if not path:
            tree = {**tree, "more": draw(st.sampled_from(NASTY))}
        elif draw(st.integers(0, 9)) == 0:
            tree = _with(tree, path, lambda _: ...)
        else:
            other = draw(st.integers(0, len(NASTY) - 1))
            keeps_type = draw(st.integers(0, 3)) > 0
            tree = _with(tree, path, lambda value, other=other, keeps_type=keeps_type: _nasty(value, other, keeps_type))
    frame = msgspec.msgpack.encode(tree)
    match draw(st.integers(0, 11)):
        case 0:
            return frame[: draw(st.integers(0, len(frame)))]
        case 1:
            position = draw(st.integers(0, len(frame) - 1))
            return frame[:position] + bytes([draw(st.integers(0, 255))]) + frame[position + 1 :]
        case 2:
            return draw(st.binary(max_size=40))
        case 3:
            # One field more, whose value no reader can skip.
            return bytes([0x80 | len(tree) + 1]) + frame[1:] + b"\xa1z" + DEEP[-1500:] if len(tree) < 15 else frame
    return frame
