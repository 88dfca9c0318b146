"""Judges one subject each: opens it, finds what it must be, runs the checks in order.

A judge begins with the anchor and ends with a :class:`~verify.report.Report`; what a
difference means is decided by :mod:`verify.checks`. Called by :mod:`verify.cli`.
"""
