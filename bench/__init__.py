"""Benchmarks: ``python -m bench NAME [--quick] [--json]`` from the checkout's root.

One module a benchmark, found by scanning this package. A module offers ``NAME``, ``HELP`` (one
line), ``add_arguments(parser)`` for its own options and ``run(args) -> dict`` with ``settings``,
``samples``, ``spread``, ``noisy`` and its headline keys. Tables go through
:func:`bench.common.table`.
"""
