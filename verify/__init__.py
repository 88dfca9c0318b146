"""Judges trees, sdists, wheels, environments, bundles and images against pins.

Read-only and offline. It never imports :mod:`builder`, never imports or starts what it
judges, and uses the standard library only, so that ``verify.pyz`` runs on a bare Python.
Called by ``python -m verify`` and by gates that hold ``verify.pyz``.
"""
