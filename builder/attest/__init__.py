"""Says what a build did, and signs it: statements, envelopes, keys, trust roots.

docs/attestation.md is the specification. Statements are pure functions of what was packaged;
only :mod:`.keys` and :mod:`.signers` touch files and processes. Called by the build and by the
``key`` and ``trust`` commands; judging is :mod:`verify`'s.
"""
