"""Moves pages between the engine's memory and the store, off the model's thread.

The only folder besides ``connector.py`` and ``geometry.py`` that may import torch.
Called by the connector's worker side.
"""
