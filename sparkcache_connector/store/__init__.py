"""Authenticated, crash-safe pages on one rank's local NVMe.

Owns the files under a cache root and nothing else; ``docs/format.md`` is the specification.
It never imports vLLM or torch. Called by the connector's worker side and by the
``sparkcache`` command. In use::

    with Store.open(path, identity=digest, rank=0, options=Options(high_bytes=1 << 40)) as store:
        receipt = store.publish(context, boundary, [GroupPages(kind, page_bytes, first, pages), …],
                                base=longest_held_context)   # durable when it returns
        index = store.longest(contexts_of_the_prompt)        # in memory, no side effects
        with store.plan(contexts_of_the_prompt[index]) as plan:
            # compare plan.manifest (groups, page sizes, boundary) with the live geometry, then:
            store.read(plan, destinations, verified=place, cancel=event, deadline=monotonic)
        store.inventory(); store.drain_changes()             # for the quorum
        store.withdraw([context])                            # at once, without waiting
        store.remove([context]); store.quarantine(context)
        store.maintain(); store.rotate_key(); store.stats()

``holds``, ``longest``, ``inventory``, ``drain_changes`` and ``withdraw`` never wait for the disk
and may be called on the engine's thread; everything else belongs on another one. ``publish``
raises :class:`Refused`, ``plan`` and ``read`` raise :class:`Miss`, both raise
:class:`Stopped`; all are :class:`StoreError` with a ``reason`` to count. None of them leaves a
buffer of the caller in use.
"""

from sparkcache_connector.store.core import Options
from sparkcache_connector.store.errors import (
    Miss,
    Reason,
    Refused,
    Stopped,
    StoreError,
    Unusable,
)
from sparkcache_connector.store.maintenance import Report
from sparkcache_connector.store.manifest import Group, GroupKind, Manifest
from sparkcache_connector.store.publication import GroupPages, Receipt
from sparkcache_connector.store.reader import Destinations, Plan, Verified
from sparkcache_connector.store.store import Changes, Stats, Store

__all__ = [
    "Changes",
    "Destinations",
    "Group",
    "GroupKind",
    "GroupPages",
    "Manifest",
    "Miss",
    "Options",
    "Plan",
    "Reason",
    "Receipt",
    "Refused",
    "Report",
    "Stats",
    "Stopped",
    "Store",
    "StoreError",
    "Unusable",
    "Verified",
]
