"""Dense fp32, 32 bits per parameter: what is sent is what is added, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distribai.core.codecs import PARTS
from distribai.core.tensors import TensorSpec
from distribai.merge.codecs import Part, Reader


class Fp32:
    """The stored array is the tensor."""

    name = "fp32"

    def parts(self, spec: TensorSpec) -> tuple[Part, ...]:
        """One part, without suffix."""
        return PARTS[self.name](spec)

    def encode(self, values: NDArray[np.float32]) -> Mapping[str, NDArray[Any]]:
        """The values themselves."""
        return {"": values}

    def reader(self, spec: TensorSpec, parts: Mapping[str, NDArray[Any]]) -> Reader:
        """Views of the stored array; nothing is copied."""
        line: NDArray[np.float32] = parts[""].reshape(-1)

        def read(start: int, stop: int, scratch: NDArray[np.float32], /) -> NDArray[np.float32]:
            return line[start:stop]

        return read


CODECS = (Fp32(),)
