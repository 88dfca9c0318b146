"""Authenticated, crash-safe pages on one rank's local NVMe.

Owns the files under a cache root and nothing else; ``docs/format.md`` is the
specification. It never imports vLLM or torch. Called by the connector's worker side and
by the ``sparkcache`` command.
"""
