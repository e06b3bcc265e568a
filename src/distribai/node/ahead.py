"""Fetching what a job's next task will need, before it asks.

When a round of a job has merged the node hears of the new version and the ways to it. It fetches
the updates then, if it holds an older version; or, where it has begun a snapshot and no task of the
job waits for it any more, the rest of that snapshot and the updates since. A snapshot is not begun
here: by the time that a newcomer has a task the version may be another one.

One download of a job at a time, in the order in which they are applied; what is next is decided
anew after each, since a newer version may have come meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from distribai.core.spec import BlobRef
from distribai.core.tasks import WeightsRef
from distribai.core.ways import way_to
from distribai.errors import DistribAIError, InternalFault
from distribai.node.begun import Begun
from distribai.node.cache import BlobCache
from distribai.node.fetching import Fetcher

log = structlog.get_logger("distribai.node")


class Ahead:
    """What is fetched ahead, by job.

    Args:
        held: the version of a job that is in memory; None when there is none.
        may: whether anything may be fetched now.
        waits: whether a task in hand fetches for the job itself.
    """

    def __init__(
        self,
        cache: BlobCache,
        fetcher: Fetcher,
        begun: Begun,
        held: Callable[[str], int | None],
        may: Callable[[], bool],
        waits: Callable[[str], bool],
    ) -> None:
        self._cache, self._fetcher, self._begun = cache, fetcher, begun
        self._held, self._may, self._waits = held, may, waits
        self._newest: dict[str, WeightsRef] = {}
        self._at_work: set[str] = set()

    def hear(self, job_id: str, weights: WeightsRef) -> None:
        """There is a new version of a job that this node has worked for."""
        self._newest[job_id] = weights

    def forget(self, job_id: str) -> None:
        """The job has ended."""
        self._newest.pop(job_id, None)

    async def fetch(self, job_id: str) -> None:
        """Fetch what the job's newest version needs, as far as it is worth it. A problem ends it
        until the next version; a task that needs the blobs tells of it."""
        if job_id in self._at_work:
            return
        self._at_work.add(job_id)
        try:
            while (blob := self._next(job_id)) is not None:
                await self._fetcher.fetch(blob, job_id)
        except InternalFault as problem:
            log.warning("malformed end of a round", reason=problem.message)
        except (DistribAIError, OSError) as problem:
            log.info("could not fetch ahead; the task will", why=str(problem))
        finally:
            self._at_work.discard(job_id)

    def _next(self, job_id: str) -> BlobRef | None:
        """The first blob on the way to the newest version that is not here.

        Raises:
            InternalFault: ``protocol.malformed``: no way leads there.
        """
        weights = self._newest.get(job_id)
        if weights is None or not self._may():
            return None
        held, begun = self._held(job_id), self._begun.of(job_id)
        if held is None and (not begun or self._waits(job_id)):
            return None
        held = None if held is None else min(held, weights.version)
        here = self._cache.held_of((*weights.blobs, *(ref.blob for ref in begun)))
        way = way_to(weights, held, here=here, begun=begun)
        if way.start != "held" and not any(ref.blob == way.whole for ref in begun):
            return None
        return next((b for b in way.blobs if here.get(b.sha256) != b.size), None)
