"""The canonical path: version 0, deltas, the outer step, updates, manifests.

Everything here is numpy, bounded in memory and bit-exact on any machine: elementwise IEEE
``+ - * max`` in a written order, no BLAS, no fused multiply-add, no reduction whose order a library
chooses. ``tensorfile`` reads and writes every file, ``kernel`` walks tensors in cache-size chunks.
"""
