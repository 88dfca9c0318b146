"""Counters, Prometheus metrics and JSON records of publications and restores.

Owns names and schemas of what operators read; never decides anything. Called by the
connector and the store's callers.
"""
