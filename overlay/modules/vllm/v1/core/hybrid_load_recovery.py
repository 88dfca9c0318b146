# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the SparkCache authors
"""What a failed external load means when there are several KV cache groups.

With one group, the blocks before the first invalid one still hold a valid
prefix, and the scheduler resumes there. A recurrent group keeps one state and no
prefix of it, so nothing of a hybrid load is worth keeping: the request that
waits for it starts again from zero, or fails, as the load-failure policy says.

Only requests that are still waiting for their load are concerned. A load writes
into blocks that were newly allocated for it, so a request that already computes
can hold an invalid block only by sharing it with a waiting one, or because the
connector broke its contract, which is logged.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

logger = init_logger(__name__)


def handle_failed_hybrid_loads(
    kv_cache_manager: "KVCacheManager",
    requests: Iterable["Request"],
    invalid_block_ids: set[int],
    recompute: bool,
) -> set[str]:
    """Send the requests whose load failed back to zero computed tokens.

    Args:
        kv_cache_manager: Knows the block tables.
        requests: All live requests.
        invalid_block_ids: What the workers reported. The null block stands in
            every table and is never loaded into, so it counts for no request.
        recompute: The load-failure policy. Without it nothing is changed here.

    Returns:
        The ids of the requests that wait for a failed load: to be retried once
        the load has ended under ``recompute``, to be failed otherwise.
    """
    invalid = invalid_block_ids - {kv_cache_manager.block_pool.null_block.block_id}
    holders = [
        (request, held)
        for request in requests
        if (held := _blocks_of(kv_cache_manager, request) & invalid)
    ]
    waiting = [
        (request, held)
        for request, held in holders
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    ]
    _report_broken_contract(holders, set().union(*(held for _, held in waiting)))
    failed_ids = {request.request_id for request, _ in waiting}
    if failed_ids:
        (logger.warning if recompute else logger.error)(
            "KV load failure of a hybrid model: %s %d request(s), %d tokens: %s",
            "recomputing" if recompute else "failing",
            len(failed_ids),
            sum(request.num_computed_tokens for request, _ in waiting),
            ", ".join(sorted(failed_ids)),
        )
    if recompute:
        for request, _ in waiting:
            request.num_computed_tokens = 0
    return failed_ids


def _blocks_of(kv_cache_manager: "KVCacheManager", request: "Request") -> set[int]:
    return set().union(*kv_cache_manager.get_block_ids(request.request_id))


def _report_broken_contract(holders: list[tuple["Request", set[int]]], claimed: set[int]) -> None:
    for request, held in holders:
        if request.status == RequestStatus.RUNNING and not held <= claimed:
            logger.error(
                "KV load failure reported for blocks %s of running request %s, "
                "which waits for no load. Its output may be wrong: a connector may "
                "load hybrid models only asynchronously, and must report a failure "
                "no later than the end of the load.",
                sorted(held - claimed),
                request.request_id,
            )
