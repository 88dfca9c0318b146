"""Decisions made on the scheduler side: where to stop, what is proven, who holds what.

Pure functions and automata over plain values. Nothing here imports vLLM or torch, opens a
file or reads a clock; ``connector.py`` translates vLLM's objects and calls in.
"""
