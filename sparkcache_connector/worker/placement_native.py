"""Placement by ``libsparkcache_placement.so``."""

from __future__ import annotations

from .placement import Placement, PlacementOptions
from .placement_layout import PageLayout


class NativeMissingError(Exception):
    """The library is not installed here or cannot serve this device; torch may."""


def open_native(layout: PageLayout, options: PlacementOptions) -> Placement:
    """Open the native library for ``layout``."""
    raise NativeMissingError("this build carries no native library")
