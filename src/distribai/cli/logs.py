"""Structured logs on stderr: for people on a terminal, JSON lines elsewhere."""

from __future__ import annotations

import logging
import os
import sys

import structlog


def wants_debug() -> bool:
    """Whether the person asked for debug logs: ``--debug`` or DISTRIBAI_DEBUG."""
    return os.environ.get("DISTRIBAI_DEBUG", "") not in ("", "0")


def configure(debug: bool) -> None:
    """Send structlog's and the standard library's logs to stderr, from info (or debug) on."""
    level = logging.DEBUG if debug else logging.INFO
    terminal = sys.stderr.isatty()
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: structlog.types.Processor = (
        structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processor=renderer)
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level if debug else logging.WARNING)
