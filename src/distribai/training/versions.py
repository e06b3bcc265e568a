"""The canonical copy of a job on this machine, and how it gets to the version a task wants.

Every version that is reached is hashed and compared with what the orchestrator says, so that a
wrong update is found before any step is trained on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import numpy as np

from distribai.core.child import FromChild, Kept, Run
from distribai.core.spec import BlobRef
from distribai.core.tasks import KeptRef, WeightsRef
from distribai.core.tensors import ParameterManifest
from distribai.core.ways import NOTHING, Way, way_to
from distribai.errors import Integrity
from distribai.merge.update import apply_update
from distribai.merge.version0 import make_version0
from distribai.merge.weights import Weights, open_weights, weights_hash, write_weights

Fetch = Callable[[Iterable[BlobRef]], Mapping[str, Path]]
"""Local paths of blobs by SHA-256, see ``Channel.fetch``."""

Tell = Callable[[FromChild], None]
"""Hears of what else the daemon has to know."""

KEPT = "kept.safetensors"
"""The file in ``Run.out_dir`` that goes with ``Kept``."""


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

    def advance(
        self,
        target: WeightsRef,
        fetch: Fetch,
        here: Mapping[str, int] = NOTHING,
        begun: Collection[KeptRef] = (),
    ) -> tuple[BlobRef, ...]:
        """Reach ``target``; afterwards ``hash`` equals ``target.weights_hash``.

        Where the version held so far does not lead there, it starts anew, from a snapshot or the
        seed. When that fails too the copy is dropped. A snapshot that was ``begun`` and is gone, or
        is none of this history's, costs no more than the other way.

        Args:
            target: the version, and what leads there.
            fetch: brings blobs; only one that was ``begun`` may be missing from what it returns.
            here, begun: see :func:`way_to`.

        Returns:
            The blobs that it took.

        Raises:
            Integrity: a version does not hash to what the orchestrator says.
            InternalFault: see :func:`way_to`.
        """
        held = self.version if self.weights is not None else None
        if held == target.version and self.hash == target.weights_hash:
            return ()
        if held is not None and held >= target.version:
            held = None  # An older version is wanted, or this copy is not what it should be.
        way = way_to(target, held, self._from_seed, here, begun)
        paths = fetch(way.blobs)
        if way.whole is not None and way.whole.sha256 not in paths:
            way = way_to(target, held, self._from_seed, here)
            paths = fetch(way.blobs)
        try:
            self._go(way, target, paths)
        except Integrity:
            if way.start != "held" and not any(ref.blob == way.whole for ref in begun):
                raise
            # What lay here may be a version of the same number, but of a grid that has since been
            # restored from a backup: that is nobody's fault, and no attempt's failure.
            way = way_to(target, None, self._from_seed, here)
            self._go(way, target, fetch(way.blobs))
        return way.blobs

    def write(self, path: Path) -> BlobRef:
        """Write the weights to a file, to the byte the snapshot of their version.

        Raises:
            OSError: the disk refuses; nothing is left behind.
        """
        assert self.weights is not None, "a version was reached"
        return write_weights(path, self._manifest, self.weights)

    def _go(self, way: Way, target: WeightsRef, paths: Mapping[str, Path]) -> None:
        weights, self.weights = self.weights, None
        if way.start != "held" or weights is None:
            weights = self._first(way, paths)
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

    def _first(self, way: Way, paths: Mapping[str, Path]) -> Weights:
        if way.whole is None:
            return make_version0(self._manifest, self._seed)
        opened = open_weights(paths[way.whole.sha256], self._manifest)
        # Updates change the copy in place, the file is a read-only map.
        return {name: np.array(opened[name], copy=True) for name in opened}

    def _check(self, weights: Weights, version: int, wanted: str) -> None:
        self.hash = weights_hash(self._manifest, weights)
        if self.hash != wanted:
            raise _differs(version, self.hash, wanted)


def reach(copy: CanonicalCopy, run: Run, fetch: Fetch, tell: Tell) -> None:
    """Have ``copy`` reach the base of a task. A version that the grid keeps for long is put on this
    machine's disk as well, if there is room: whoever loses the copy, or is asked for an older
    version, starts from there and fetches nothing whole.

    Raises:
        Integrity, InternalFault: see :meth:`CanonicalCopy.advance`.
    """
    target = run.assignment.base
    took = copy.advance(target, fetch, run.here, run.begun)
    kept = target.kept
    if kept is None or kept.version != target.version or kept.blob.size > run.room:
        return
    if kept.blob in took or run.here.get(kept.blob.sha256) == kept.blob.size:
        return
    path = Path(run.out_dir) / KEPT
    try:
        blob = copy.write(path)
    except OSError:  # it only saves bytes later
        return
    if blob == kept.blob:
        tell(Kept(str(path), blob))
    else:  # weights of the user's, with a header of their own
        path.unlink()


def _differs(version: int, found: str, wanted: str) -> Integrity:
    return Integrity(
        "blob.hash",
        f"Version {version} hashes to {found[:12]} here, to {wanted[:12]} on the orchestrator.",
        "The attempt starts again from a snapshot or from the seed; if it repeats, report it.",
    )
