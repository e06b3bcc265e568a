"""Whether an organization may have one more job, and whether it is accepted at once."""

from __future__ import annotations

from distribai.core.people import (
    HOME_NAME,
    Asked,
    Excess,
    Policy,
    Principal,
    Quota,
    Usage,
    Verdict,
    decide,
    over_bytes,
    over_quota,
)
from distribai.core.plain import from_plain
from distribai.core.plan import parameter_count, plan
from distribai.core.spec import BlobRef, JobSpec
from distribai.errors import Conflict, InvalidSpec, NotAllowed, NotFound, UsageError
from distribai.orchestrator.context import Grid
from distribai.orchestrator.fleet import supplies
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import holdings, people


async def organization_for(grid: Grid, caller: Principal, ref: str) -> str:
    """The organization that a job is submitted to: the one that ``ref`` names, else the only one
    that the caller may submit to, for operators ``home``.

    Raises:
        NotFound: ``organization.unknown``: there is none, or the caller may see nothing of it.
        NotAllowed: ``auth.forbidden``: the caller may only look at it, or is in none.
        UsageError: ``organization.choose``: there are several to choose from.
    """
    allowed, seen = caller.works_in(), caller.sees()
    async with grid.db.read() as tx:
        if ref or allowed is None:
            known = ref.isprintable()  # PostgreSQL takes no zero
            found = await people.organization(tx, ref or HOME_NAME) if known else None
            if found is None or (seen is not None and found.id not in caller.roles):
                raise NotFound(
                    "organization.unknown",
                    f"No organization has the id or name {ref[:80]!r}.",
                    "`distribai team list` lists yours.",
                    field="organization",
                )
            if allowed is None or found.id in allowed:
                return str(found.id)
            raise NotAllowed(
                "auth.forbidden",
                f"You may not submit jobs to {found.name}.",
                "Its members may; ask the operator.",
            )
        names = [o.name for o in await people.organizations_page(tx, allowed)]
    if not allowed:
        raise NotAllowed(
            "auth.forbidden",
            "You are a member of no organization that jobs could be submitted to.",
            "Ask the operator.",
        )
    if len(allowed) > 1:
        raise UsageError(
            "organization.choose",
            f"You may submit to {', '.join(names)}: say for which the job is.",
            "Give `--organization NAME`.",
            field="organization",
        )
    return next(iter(allowed))


def asked_of(grid: Grid, spec: JobSpec) -> Asked:
    """How large a valid job is, with as many workers as it asks for.

    Raises:
        InvalidSpec: ``spec.model_too_large``, ``spec.plan``: this grid takes no such job of
            anybody.
    """
    parameters, settings = parameter_count(spec), grid.settings
    if parameters > settings.max_parameters:
        raise InvalidSpec(
            "spec.model_too_large",
            f"The model has {parameters} parameters; this grid takes at most "
            f"{settings.max_parameters}.",
            "Take a smaller profile, or ask the operator.",
            field="model",
        )
    if spec.snapshots.keep > settings.max_snapshots:
        raise InvalidSpec(
            "spec.plan",
            f"snapshots.keep is {spec.snapshots.keep}: this grid keeps at most "
            f"{settings.max_snapshots} snapshots of a job.",
            "Keep fewer, or ask the operator: orchestrator.max_snapshots.",
            field="snapshots.keep",
        )
    return Asked(parameters, spec.steps, plan(spec, parameters, spec.workers_max).tokens)


async def excess_of(tx: Tx, organization_id: str, asked: Asked) -> Excess | None:
    """The quota that a job would break as things stand, if there is one."""
    row = await people.organization(tx, organization_id)
    return None if row is None else await _excess(tx, row, asked)


async def foresee(grid: Grid, organization_id: str, spec: JobSpec) -> Excess | None:
    """What stands in the way of a job that is only planned: the quota that is full for now.

    Raises:
        InvalidSpec: as :func:`asked_of`.
        Conflict: ``quota.*``: the job would break one at any time.
    """
    asked = asked_of(grid, spec)
    async with grid.db.read() as tx:
        excess = await excess_of(tx, organization_id, asked)
    if excess is not None and not excess.passing:
        refuse(excess)
    return excess


async def admit(tx: Tx, organization_id: str, asked: Asked) -> tuple[str, Verdict]:
    """The organization's name, and whether its policy accepts a job of this size now. Its row is
    locked: two jobs at once do not both take the last place of a quota.

    Raises:
        Conflict: ``quota.*``: the job would break one of its quotas.
    """
    row = await people.lock_organization(tx, organization_id)
    if row is None:
        # A grid before its first start: nobody but the operator is there.
        return HOME_NAME, decide(Policy(), asked, tx.now)
    refuse(await _excess(tx, row, asked))
    return str(row.name), decide(from_plain(Policy, row.policy), asked, tx.now)


async def _excess(tx: Tx, row: AnyRow, asked: Asked) -> Excess | None:
    quota = from_plain(Quota, row.quota)
    if quota == Quota():
        return None
    usage = Usage(await holdings.open_jobs(tx, row.id), await holdings.stored_bytes(tx, row.id))
    return over_quota(quota, row.name, usage, asked)


async def check_upload(grid: Grid, caller: Principal, ref: BlobRef) -> None:
    """Refuse an upload for which none of the caller's organizations has room, or that is no result
    of a node's work.

    Raises:
        Conflict: ``quota.bytes``.
        NotAllowed, Integrity, TooMany: as ``fleet.supplies.check_upload``.
    """
    if caller.kind == "node":
        await supplies.check_upload(grid, caller.node_id, ref)
        return
    allowed = caller.works_in()
    if allowed is None:
        return
    excess = None
    async with grid.db.read() as tx:
        for row in await people.organizations_page(tx, allowed):
            quota = from_plain(Quota, row.quota)
            if quota.bytes is None:
                return
            usage = Usage(0, await holdings.stored_bytes(tx, row.id))
            excess = over_bytes(quota, row.name, usage, ref.size)
            if excess is None:
                return
    refuse(excess)


def refuse(excess: Excess | None) -> None:
    """Raise what is over a quota, if anything is.

    Raises:
        Conflict: ``quota.*``.
    """
    if excess is not None:
        raise Conflict(excess.code, f"{excess.reason}.", excess.hint)
