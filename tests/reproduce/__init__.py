"""Shows that a build depends on its inputs alone: ``python -m tests.reproduce``."""
