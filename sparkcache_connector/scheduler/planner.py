"""Which stored boundary to offer a waiting request: the longest that every rank holds.

vLLM asks on every scheduling pass while a request waits, hundreds of times. A plan therefore
keeps its last answer together with the quorum's version, and the usual question costs one
comparison. Asking changes nothing that anyone else can see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkcache_connector.scheduler.quorum import Quorum


@dataclass(frozen=True, slots=True)
class Offer:
    """A root that can be restored for a request."""

    boundary: int
    root: bytes


class RestorePlan:
    """One request's candidates, from the longest boundary down.

    Args:
        candidates: ``(boundary, root)`` of every boundary of the prompt, ascending; at most
            the prompt minus one token, because the last token must be computed.
        min_span: boundaries below it are not worth a restore.
    """

    def __init__(self, candidates: Sequence[tuple[int, bytes]], *, min_span: int = 1) -> None:
        self._candidates = [
            Offer(boundary, root) for boundary, root in reversed(candidates) if boundary >= min_span
        ]
        self._excluded: set[bytes] = set()
        self._answer: Offer | None = None
        self._answered_for = -1

    def longest(self, quorum: Quorum, *, computed: int) -> Offer | None:
        """The longest offer beyond what is computed locally, or None.

        Args:
            quorum: who holds what.
            computed: tokens of the prompt that the engine has itself.
        """
        if quorum.version != self._answered_for:
            self._answer = self._search(quorum)
            self._answered_for = quorum.version
        answer = self._answer
        return answer if answer is not None and answer.boundary > computed else None

    def exclude(self, root: bytes) -> None:
        """Never offer this root to this request again: it failed, and would fail in a loop."""
        self._excluded.add(root)
        self._answered_for = -1

    @property
    def excluded(self) -> frozenset[bytes]:
        """Roots that failed for this request."""
        return frozenset(self._excluded)

    def _search(self, quorum: Quorum) -> Offer | None:
        for offer in self._candidates:
            if quorum.holds(offer.root) and offer.root not in self._excluded:
                return offer
        return None


def candidates(
    digests: Sequence[bytes], *, chunk_tokens: int, unit: int, prompt_tokens: int
) -> list[tuple[int, bytes]]:
    """Every boundary of a prompt with its digest, ascending.

    Args:
        digests: context digest at each whole chunk, the first at one chunk.
        chunk_tokens: tokens per chunk.
        unit: boundary unit, a multiple of the chunk.
        prompt_tokens: length of the prompt; its last token is never covered.
    """
    step = unit // chunk_tokens
    return [
        (index * chunk_tokens, digests[index - 1])
        for index in range(step, len(digests) + 1, step)
        if index * chunk_tokens < prompt_tokens
    ]
