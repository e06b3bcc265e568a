"""A typed client of the HTTP interface, synchronous and asynchronous.

::

    with Client("http://127.0.0.1:8766", token) as grid:
        for job in grid.jobs():
            print(job.id, job.state)

Failures are the same exceptions that the orchestrator raised (``distribai.errors``), by code.
"""

from distribai.client.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]
