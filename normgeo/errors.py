"""The errors normgeo raises on purpose.

Every message says what was wrong, what was received and what to do about it. Anything else that reaches a user is a
bug.
"""


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
