"""Makes the patched vLLM: acquire, patch, compose, package, attest.

Owns every step from an exact upstream release to a bundle under ``dist/``. It never
judges its own work (that is :mod:`verify`, which never imports this package) and never
imports vLLM. Called by the Makefile and by ``python -m builder``.
"""
