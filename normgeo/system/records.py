"""What JSON says, as the values that it was made of: a checksum does not tell who wrote it, nor by which version."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

__all__ = ["parsed", "read_as"]

NUMBERS = (int, float)


def parsed(text: str | bytes) -> Any:
    """What JSON says.

    Raises:
        ValueError: it is none, or nested more deeply than Python reads.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_as(kind: Any, value: Any, name: str = "it") -> Any:
    """A value of a type, from what `dataclasses.asdict` made of one, and JSON of that.

    Args:
        kind: a dataclass, or a `TypedDict`, which says of some keys what they hold and of others nothing; text,
            numbers, None, `Literal`, lists, tuples, dictionaries by text, and unions of them.
        value: of the JSON.
        name: what it is called in errors.

    Raises:
        TypeError: it, or a part of it, is of another type, is missing, or is none that the type has.

    >>> read_as(tuple[int, ...] | None, [1, 2])
    (1, 2)
    >>> read_as(dict[str, list[int]], {"a": [1, "2"]})
    Traceback (most recent call last):
        ...
    TypeError: it.a[1] is '2', no int
    """
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _as_any(parts, value, name, kind)
    if dataclasses.is_dataclass(kind) or is_typeddict(kind):
        return _as_fields(kind, value, name)
    if origin is dict and type(value) is dict:
        return {key: read_as(parts[1], part, f"{name}.{key}") for key, part in value.items()}
    if origin in (list, tuple) and type(value) in (list, tuple):
        kinds = parts[:1] * len(value) if origin is list or parts[1:] == (...,) else parts
        if len(kinds) == len(value):
            return origin(
                read_as(k, part, f"{name}[{i}]") for i, (k, part) in enumerate(zip(kinds, value, strict=True))
            )
    if (origin is Literal and value in parts) or (kind is float and type(value) in NUMBERS) or type(value) is kind:
        return value
    raise TypeError(f"{name} is {repr(value)[:80]}, no {kind if origin is Literal else (origin or kind).__name__}")


def _as_any(kinds: tuple[Any, ...], value: Any, name: str, union: Any) -> Any:
    """The value as the first of these types that it is of."""
    for kind in kinds:
        if kind is type(None) and value is None:
            return None
        try:
            return read_as(kind, value, name)
        except TypeError:
            continue
    raise TypeError(f"{name} is {repr(value)[:80]}, no {union}")


def _as_fields(kind: Any, value: Any, name: str) -> Any:
    hints = _hints(kind)
    given = {
        key: read_as(hints.get(key, Any), part, f"{name}.{key}")
        for key, part in read_as(dict[str, Any], value, name).items()
    }
    needed = kind.__required_keys__ if is_typeddict(kind) else set[str]()  # a dataclass says itself what it lacks
    if missing := needed - given.keys():
        raise TypeError(f"{name} lacks {min(missing)}")
    return kind(**given)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
