"""The errors normgeo raises on purpose.

Every message says what was wrong, what was received and what to do about it. Anything else that reaches a user is a
bug.
"""

__all__ = [
    "ActivationError", "ConversionError", "DataError", "ModelError", "NormGeoError", "RunError", "StoreError",
    "first_line", "said",
]  # fmt: skip


class NormGeoError(Exception):
    """Base of every error that normgeo raises on purpose."""


class ModelError(NormGeoError):
    """A model that is missing, gated, of an unknown kind, or unable to do what was asked of it."""


class DataError(NormGeoError):
    """Tokens or text that cannot be used: unknown format, empty, too short, or beyond the vocabulary."""


class ActivationError(NormGeoError):
    """Hidden states that carry no angle: all zero or not finite."""


class ConversionError(NormGeoError):
    """A conversion that is impossible, or whose certificate failed."""


class RunError(NormGeoError):
    """A run directory that belongs to another run, is damaged, or cannot be written."""


class StoreError(RunError):
    """A store of hidden states that is damaged, incomplete, another's, or in use."""


def first_line(error: BaseException) -> str:
    """The first line of what another's error says, or else its kind."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def said(error: BaseException) -> str:
    """The kind of another's error, and what it says, as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
