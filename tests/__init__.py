"""The specification in executable form; ``python -m tests.suites`` runs all of it."""
