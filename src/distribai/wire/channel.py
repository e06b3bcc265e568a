"""Numbers and acknowledgements of one direction pair, pure.

Both sides keep one :class:`Channel` per session. Each numbers what it sends from 1, keeps it until
the other side has acknowledged it, and takes what it receives in order. A connection may break at
any moment and lose everything in flight: when both sides meet again under the same session they
exchange ``received``, call :meth:`Channel.resume` and send :meth:`Channel.unacked` again under the
same numbers. Every message then arrives exactly once and in order, however often that happens.

When the other side has forgotten the session (it was restarted), :meth:`Channel.renumber` starts
over: what was not acknowledged is sent again under new numbers. It may then arrive a second time,
so whoever reads it must know a repeated task result by its task and attempt.

::

    node                                          orchestrator
    send(number(body), received) ---------------> on_receive(seq, ack)
                                 <--------------- send(number(body), received)
    on_receive(seq, ack)
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Literal, TypeVar

from distribai.errors import ProtocolMismatch, Unavailable

M = TypeVar("M")

Verdict = Literal["deliver", "duplicate"]

RELIABLE: frozenset[str] = frozenset(
    {
        "task_accept",
        "task_result",
        "task_assign",
        "round_complete",
        "control",
        "task_result_ack",
    }
)
"""Body fields of both envelopes that are numbered; all others carry number 0."""

CAPACITY = 10_000
"""Unacknowledged messages that a channel keeps. A node sends two per task and an orchestrator a
handful per round, so a full buffer means a peer that reads but never acknowledges."""


class Channel(Generic[M]):
    """One side's numbering of a session.

    Args:
        capacity: how many unacknowledged messages may wait.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        if capacity < 1:
            raise ValueError("a channel holds at least one message")
        self._capacity = capacity
        self._kept: deque[tuple[int, M]] = deque()
        self._sent = 0
        self._acked = 0
        self._received = 0

    @property
    def sent(self) -> int:
        """The highest number given out."""
        return self._sent

    @property
    def received(self) -> int:
        """The highest number received in order: the ``ack`` of whatever is sent next."""
        return self._received

    def number(self, body: M, *, reliable: bool = True) -> int:
        """The number under which ``body`` goes out; a reliable one is kept until acknowledged.

        Raises:
            Unavailable: ``protocol.backlog``, too much waits for acknowledgement already.
        """
        if not reliable:
            return 0
        if len(self._kept) >= self._capacity:
            raise Unavailable(
                "protocol.backlog",
                f"{len(self._kept)} messages wait for acknowledgement; no more can be sent.",
                "The other side must be cut off and reconnected.",
            )
        self._sent += 1
        self._kept.append((self._sent, body))
        return self._sent

    def on_receive(self, seq: int, ack: int) -> Verdict:
        """:meth:`judge`, and :meth:`dealt_with` for who deals with a body before anything else
        can happen.

        Raises:
            ProtocolMismatch: as :meth:`judge`.
        """
        verdict = self.judge(seq, ack)
        self.dealt_with(seq)
        return verdict

    def dealt_with(self, seq: int) -> None:
        """Count a judged envelope as received: the other side will not send it again.

        Who needs time to deal with a body calls this afterwards. When the connection breaks before,
        the message comes again, so dealing with it twice must do no harm.
        """
        self._received = max(self._received, seq)

    def judge(self, seq: int, ack: int) -> Verdict:
        """Take note of a received envelope's acknowledgement and say whether its body is new.

        Raises:
            ProtocolMismatch: ``protocol.sequence``: a message before this one is missing, or
                something was acknowledged that was never sent. The state is unchanged; only a new
                connection helps.
        """
        if ack > self._sent:
            raise ProtocolMismatch(
                "protocol.sequence",
                f"Message {ack} was acknowledged, but only {self._sent} were sent.",
            )
        if seq > self._received + 1:
            raise ProtocolMismatch(
                "protocol.sequence",
                f"Message {seq} arrived where {self._received + 1} was due.",
            )
        self._forget(ack)
        if seq == 0:
            return "deliver"
        return "duplicate" if seq <= self._received else "deliver"

    def unacked(self, after: int = 0) -> tuple[tuple[int, M], ...]:
        """Number and body of everything beyond number ``after`` that waits, in order."""
        return tuple((seq, body) for seq, body in self._kept if seq > after)

    def resume(self, peer_received: int) -> None:
        """Go on with the same session over a new connection.

        Args:
            peer_received: the highest number that the other side says it received in order.

        Raises:
            ProtocolMismatch: ``protocol.sequence``, the other side claims more than was sent, or
                less than it acknowledged before, so that the gap cannot be filled.
        """
        if not self._acked <= peer_received <= self._sent:
            raise ProtocolMismatch(
                "protocol.sequence",
                f"The other side received up to {peer_received}, which is not within "
                f"{self._acked} (acknowledged) and {self._sent} (sent).",
            )
        self._forget(peer_received)

    def renumber(self) -> None:
        """Start over for a new session: what was not acknowledged is numbered from 1 again."""
        bodies = [body for _, body in self._kept]
        self._kept = deque(enumerate(bodies, start=1))
        self._sent = len(bodies)
        self._acked = 0
        self._received = 0

    def _forget(self, upto: int) -> None:
        self._acked = max(self._acked, upto)
        while self._kept and self._kept[0][0] <= upto:
            self._kept.popleft()
