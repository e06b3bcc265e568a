"""The canonical copy of a job on this machine, and how it gets to the version a task wants.

Every version that is reached is hashed and compared with what the orchestrator says, so that a
wrong update is found before any step is trained on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from distribai.core.spec import BlobRef
from distribai.core.tasks import UpdateRef, WeightsRef
from distribai.core.tensors import ParameterManifest
from distribai.errors import Integrity, InternalFault
from distribai.merge.update import apply_update
from distribai.merge.version0 import make_version0
from distribai.merge.weights import Weights, open_weights, weights_hash

Fetch = Callable[[Iterable[BlobRef]], Mapping[str, Path]]
"""Local paths of blobs by SHA-256, see ``Channel.fetch``."""


@dataclass(frozen=True, slots=True)
class Way:
    """Where to start from, and the updates to apply then, in order."""

    start: Literal["held", "snapshot", "seed"]
    updates: tuple[UpdateRef, ...]

    def blobs(self, target: WeightsRef) -> tuple[BlobRef, ...]:
        """What has to be fetched."""
        first = (target.snapshot,) if self.start == "snapshot" and target.snapshot else ()
        return (*first, *(u.blob for u in self.updates))


def way_to(target: WeightsRef, held: int | None, from_seed: bool = False) -> Way:
    """The way with the fewest bytes to ``target`` for who holds version ``held`` (or nothing).

    ``from_seed``: version 0 can be made from the seed, so that encoded updates from the first one
    on may take fewer bytes than a snapshot. Of equal ones the first of held, seed, snapshot.

    Raises:
        InternalFault: ``protocol.malformed``: the reference leads nowhere.
    """
    ways = []
    if held is not None:
        ways.append(("held", held))
    if target.snapshot is None or from_seed:
        ways.append(("seed", 0))
    if target.snapshot is not None:
        ways.append(("snapshot", target.snapshot_version))
    found = []
    for start, version in ways:
        updates = tuple(u for u in target.updates if u.version > version)
        if [u.version for u in updates] == list(range(version + 1, target.version + 1)):
            found.append(Way(start, updates))  # type: ignore[arg-type]
    if not found:
        raise InternalFault(
            "protocol.malformed",
            f"The weights reference of version {target.version} has neither a snapshot nor "
            f"all updates (this node holds {'nothing' if held is None else held}).",
        )
    return min(found, key=lambda way: sum(b.size for b in way.blobs(target)))


class CanonicalCopy:
    """Canonical weights of one job; ``weights`` is None until a version was reached.

    ``from_seed``: the job starts from its seed, not from weights of the user's.
    """

    def __init__(
        self, job_id: str, manifest: ParameterManifest, seed: int, *, from_seed: bool = False
    ) -> None:
        self._job_id, self._manifest, self._seed = job_id, manifest, seed
        self._from_seed = from_seed
        self.weights: Weights | None = None
        self.version = 0
        self.hash = ""

    def advance(self, target: WeightsRef, fetch: Fetch) -> None:
        """Reach ``target``; afterwards ``hash`` equals ``target.weights_hash``.

        Where the version held so far does not lead there, it starts anew, from the snapshot or the
        seed. When that fails too the copy is dropped.

        Raises:
            Integrity: a version does not hash to what the orchestrator says.
            InternalFault: see :func:`way_to`.
        """
        held = self.version if self.weights is not None else None
        if held == target.version and self.hash == target.weights_hash:
            return
        if held is not None and held >= target.version:
            held = None  # An older version is wanted, or this copy is not what it should be.
        way = way_to(target, held, self._from_seed)
        try:
            self._go(way, target, fetch)
        except Integrity:
            if way.start != "held":
                raise
            # What lay here may be a version of the same number, but of a grid that has since been
            # restored from a backup: that is nobody's fault, and no attempt's failure.
            self._go(way_to(target, None, self._from_seed), target, fetch)

    def _go(self, way: Way, target: WeightsRef, fetch: Fetch) -> None:
        paths = fetch(way.blobs(target))
        weights, self.weights = self.weights, None
        if way.start != "held" or weights is None:
            weights = self._first(way, target, paths)
        for update in way.updates:
            weights = apply_update(
                self._manifest,
                weights,
                paths[update.blob.sha256],
                expect={"job_id": self._job_id, "version": update.version},
                in_place=True,
            )
            self._check(weights, update.version, update.weights_hash)
        if not way.updates:
            self._check(weights, target.version, target.weights_hash)
        if self.hash != target.weights_hash:
            raise _differs(target.version, self.hash, target.weights_hash)
        self.weights, self.version = weights, target.version

    def _first(self, way: Way, target: WeightsRef, paths: Mapping[str, Path]) -> Weights:
        if way.start == "seed" or target.snapshot is None:
            return make_version0(self._manifest, self._seed)
        opened = open_weights(paths[target.snapshot.sha256], self._manifest)
        # Updates change the copy in place, the file is a read-only map.
        return {name: np.array(opened[name], copy=True) for name in opened}

    def _check(self, weights: Weights, version: int, wanted: str) -> None:
        self.hash = weights_hash(self._manifest, weights)
        if self.hash != wanted:
            raise _differs(version, self.hash, wanted)


def _differs(version: int, found: str, wanted: str) -> Integrity:
    return Integrity(
        "blob.hash",
        f"Version {version} hashes to {found[:12]} here, to {wanted[:12]} on the orchestrator.",
        "The attempt starts again from a snapshot or from the seed; if it repeats, report it.",
    )
