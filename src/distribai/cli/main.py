"""``distribai``: the commands, and what happens around every one of them.

stdout is data, stderr everything else. Exit statuses: 0 done, 1 a job that did not complete or a
grid with problems, 2 wrong words, 3 unknown or ambiguous name, 4 not allowed, 5 the state forbids
it, 6 damaged bytes, 7 versions that do not fit, 8 unreachable, 70 a defect, 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from types import TracebackType

from cyclopts import App, Parameter
from cyclopts.exceptions import CycloptsError

from distribai import __version__
from distribai.cli import (
    account as accounts,
)
from distribai.cli import (
    config,
    demo,
    errors,
    events,
    grid,
    health,
    job,
    node,
    nodes,
    orchestrator,
    output,
    submit,
    team,
    version,
    webhook,
    weights,
)
from distribai.cli import (
    login as logins,
)
from distribai.errors import DistribAIError, UsageError

app = App(
    name="distribai",
    help="Train one model on many machines that nobody owns together.",
    help_format="markdown",
    suppress_keyboard_interrupt=False,  # its exit status is ours to give
    default_parameter=Parameter(negative=""),
    help_epilogue="`--debug` with any command shows tracebacks. "
    "What an error means: `distribai errors CODE`.",
    version=__version__,
)
app.command(orchestrator.app)
app.command(node.app)
app.command(job.app)
app.command(nodes.app)
app.command(grid.app)
app.command(webhook.app)
app.command(events.grid_events, name="events")
app.command(team.app)
app.command(accounts.app)
app.command(logins.login)
app.command(config.app)
app.command(submit.submit)
app.command(demo.demo)
app.command(weights.export_weights)
app.command(weights.generate)
app.command(health.health)
app.command(errors.errors)
app.command(version.version)


class _Boundary:
    """Turns what a command raises into words on stderr and an exit status.

    A context manager rather than a blind ``except``: it sees every exception once, says it, and
    swallows none silently.
    """

    def __init__(self, debug: bool) -> None:
        self.debug = debug
        self.status = 0

    def __enter__(self) -> _Boundary:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if error is None:
            return False
        if isinstance(error, SystemExit):
            return False
        if isinstance(error, KeyboardInterrupt):
            output.note("Interrupted.")
            self.status = 130
        elif isinstance(error, BrokenPipeError):
            # Whoever read stdout has gone (`| head`).
            _silence_stdout()
            self.status = 141
        elif isinstance(error, OSError) and error.errno == errno.ENOSPC and not error.filename:
            _silence_stdout()
            self._show(
                UsageError("io.file", "The output cannot be written: no space is left for it.")
            )
        elif isinstance(error, DistribAIError):
            self._show(error)
        elif isinstance(error, CycloptsError):
            self._show(usage_error(error))
        else:
            self._show(output.defect(error, self.debug), traceback_shown=self.debug)
        return True

    def _show(self, error: DistribAIError, traceback_shown: bool = False) -> None:
        if self.debug and not traceback_shown:
            output.traceback(error)
        output.problem(error)
        self.status = error.exit_status


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status."""
    from distribai import spawn

    if argv is None and spawn.is_child(sys.argv):
        spawn.child()
    _open_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    debug = os.environ.get("DISTRIBAI_DEBUG", "") not in ("", "0")
    if "--debug" in words:
        words.remove("--debug")
        debug = True
        os.environ["DISTRIBAI_DEBUG"] = "1"  # for what the command starts or configures
    with _Boundary(debug) as boundary:
        result = app(words, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
        boundary.status = result if isinstance(result, int) else 0
    return boundary.status


def _silence_stdout() -> None:
    """Let what is still buffered go nowhere, or the interpreter's end would fail on it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_streams() -> None:
    """Give a process that was started without stdout or stderr (``>&-``) some that go nowhere."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # for as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def usage_error(error: CycloptsError) -> UsageError:
    """The command line's own complaint in our words."""
    chain = " ".join(error.command_chain or ())
    return UsageError(
        "usage.invalid",
        " ".join(str(error).split()),
        f"`distribai {chain + ' ' if chain else ''}--help` shows how to call it.",
    )
