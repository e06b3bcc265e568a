"""Virtual nodes: they live and die by their machines' plans."""

from __future__ import annotations

import asyncio
import math
import random
import shutil

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from distribai.core.ids import node_id
from distribai.node.feedback import FeedbackStore
from distribai.testing.simulation.daemon import Daemon
from distribai.testing.simulation.machines import Machine, Outage
from distribai.testing.simulation.site import Disk, Site

FEEDBACK_BYTES = 1 << 40
"""Room for error feedback: a virtual disk is large."""


class VirtualNode:
    """One machine through all its lives."""

    def __init__(self, site: Site, machine: Machine) -> None:
        self.site, self.machine = site, machine
        self.rng = random.Random(f"{site.seed}/node/{machine.name}")
        self.disk = self._new_disk(self._new_key())
        self.ids = [self._id()]

    async def live(self) -> None:
        """Run and die by the machine's plan; return when it has left for good."""
        loop = asyncio.get_running_loop()
        for start, stop, outage in self.machine.lives():
            await asyncio.sleep(max(0.0, self.site.origin + start - loop.time()))
            daemon = Daemon(self.site, self.machine, self.disk, self.rng)
            running = asyncio.create_task(daemon.run())
            try:
                left = self.site.origin + stop - loop.time()
                done, _ = await asyncio.wait({running}, timeout=left if left < math.inf else None)
                if done:
                    running.result()  # a daemon never ends by itself: raises its defect
                if outage is None:
                    await daemon.leave()
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                await daemon.die()
            if outage is not None:
                self._crash(outage, loop.time())

    def _crash(self, outage: Outage, now: float) -> None:
        if not outage.keeps_disk:
            key = self.disk.key if outage.keeps_key else self._new_key()
            self.disk = self._new_disk(key)
            if not outage.keeps_key:
                self.ids.append(self._id())
        for hand in list(self.disk.hands.values()):
            if hand.dropped:
                del self.disk.hands[hand.key]
            else:
                hand.crash(now, self.machine.checkpoint_steps)

    def _new_disk(self, key: Ed25519PrivateKey) -> Disk:
        folder = self.site.grid.settings.state_dir / "nodes" / self.machine.name
        shutil.rmtree(folder, ignore_errors=True)
        return Disk(key, FeedbackStore(folder, FEEDBACK_BYTES))

    def _new_key(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.rng.randbytes(32))

    def _id(self) -> str:
        return node_id(self.disk.key.public_key().public_bytes_raw())
