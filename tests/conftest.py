"""Shared fixtures and the fixed hypothesis profiles (`ci` is the default, `full` is deeper)."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True, database=None)
settings.register_profile("full", deadline=None, print_blob=True, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
