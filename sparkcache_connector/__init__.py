"""Persistent KV cache for vLLM that can be proven right.

Importing this package loads neither vLLM nor torch; only ``connector``, ``geometry`` and
``worker`` may. vLLM loads :mod:`sparkcache_connector.connector` by module path.
"""

__version__ = "0.1.0"
