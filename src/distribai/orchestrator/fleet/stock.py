"""What this process remembers of blobs that nodes fetch and bring (``fleet.supplies``).

In memory and bounded: what is forgotten is looked up again, or sent once more.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from distribai.orchestrator.fleet.loans import Loans

MAX_DATA_SETS = 128
"""Prepared data sets whose shards are remembered: a few hundred kilobytes each at most."""

MAX_NODES = 10_000
"""Nodes of which it is remembered what they have brought."""

MAX_BROUGHT = 32
"""Hashes that are remembered of each."""

Hands = frozenset[tuple[str, int]]
"""Attempts (task, number)."""


@dataclass
class Brought:
    """What a node has brought: ``hashes``, the latest last; and how many uploads it has ``begun``
    since ``hands`` are what it holds."""

    hashes: OrderedDict[str, None] = field(default_factory=OrderedDict)
    hands: Hands = frozenset()
    begun: int = 0


@dataclass
class Stock:
    """Hashes of data sets by their manifest's, and what nodes have brought; and what is lent."""

    loans: Loans = field(default_factory=Loans)

    _data: OrderedDict[str, frozenset[str]] = field(default_factory=OrderedDict)
    _brought: OrderedDict[str, Brought] = field(default_factory=OrderedDict)

    def data(self, manifest_sha: str) -> frozenset[str] | None:
        """The blobs of a data set, if they are remembered."""
        found = self._data.get(manifest_sha)
        if found is not None:
            self._data.move_to_end(manifest_sha)
        return found

    def keep(self, manifest_sha: str, hashes: frozenset[str]) -> None:
        """Remember the blobs of a data set."""
        self._data[manifest_sha] = hashes
        if len(self._data) > MAX_DATA_SETS:
            self._data.popitem(last=False)

    def bring(self, node_id: str, sha256: str) -> None:
        """A node has brought a blob."""
        found = self._of(node_id)
        found.hashes[sha256] = None
        if len(found.hashes) > MAX_BROUGHT:
            found.hashes.popitem(last=False)

    def has_brought(self, node_id: str, sha256: str) -> bool:
        """Whether the node has brought the blob lately."""
        found = self._brought.get(node_id)
        return found is not None and sha256 in found.hashes

    def begin(self, node_id: str, hands: Hands) -> int:
        """The node begins an upload; how many it has begun since it holds ``hands``, with this
        one."""
        found = self._of(node_id)
        if found.hands != hands:
            found.hands, found.begun = hands, 0
        found.begun += 1
        return found.begun

    def _of(self, node_id: str) -> Brought:
        found = self._brought.setdefault(node_id, Brought())
        self._brought.move_to_end(node_id)
        if len(self._brought) > MAX_NODES:
            self._brought.popitem(last=False)
        return found
