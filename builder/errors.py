"""The errors of :mod:`builder`: every one names the thing, what was expected, what was found."""

from __future__ import annotations


class BuildError(Exception):
    """Base of everything that this package raises on purpose; the command line prints it."""
