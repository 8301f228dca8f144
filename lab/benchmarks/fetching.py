"""The parts of one KV head that reads "blocks": the estimate, the lists made of it, and attention over them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh
from jaxtyping import Array

import tca_jax
from tca_jax.engine.mesh import CACHES, ROWS
from tca_jax.lab.benchmarks.common import Layer, agreement
from tca_jax.lab.benchmarks.layer_mesh import INPUTS, SEQUENCES, inputs_over, program_over
from tca_jax.methods.block_sparse import Listed
from tca_jax.methods.fetching import estimated_mass, fetch_lists
from tca_jax.pallas_kernels.backends import resolve_backend
from tca_jax.pallas_kernels.block_sparse_attention import BlockLists

#: What is timed of one head.
FETCH_STAGES = ("one head's estimate", "one head's lists", "one head's fetch attention")


@dataclasses.dataclass(frozen=True)
class OneHead:
    """A KV head with the queries of its group, on a mesh one of every device.

    Attributes:
        layer: Its layer.
        backend: Of the kernels, where they have it.
        config: Hyperparameters.
        mesh: Devices; None for one.
    """

    layer: Layer
    backend: str
    config: tca_jax.TCAConfig
    mesh: Mesh | None = None

    def program(self, function: Callable[..., Any], inputs: Sequence[Any], outputs: Any = CACHES) -> Callable[..., Any]:
        """A function of the head's arrays as a program."""
        return program_over(self.mesh, function, inputs, outputs)

    def stages(self, q: Array, k: Array, v: Array, n: Array) -> dict[str, Callable[[], Any]]:
        """Calls of the parts, given a layer's arrays: the lists hold the estimate, attention is given the lists."""
        own = (*self.program(_first_head, INPUTS[:3], INPUTS[:3])(q, k, v), n)
        asked = (SEQUENCES, SEQUENCES, ROWS)
        estimate, make = self.program(self.estimate, asked), self.program(self.lists, asked)
        lists = make(own[0], own[1], n)
        attend = self.program(self.attend, (*INPUTS, CACHES), SEQUENCES)
        calls = (
            functools.partial(estimate, own[0], own[1], n),
            functools.partial(make, own[0], own[1], n),
            functools.partial(attend, *own, lists),
        )
        return dict(zip(FETCH_STAGES, calls, strict=True))

    def estimate(self, q: Array, k: Array, n: Array) -> Array:
        """Mass of every block for every tile."""
        return estimated_mass(q, k, n, self.config, resolve_backend(self.backend))

    def lists(self, q: Array, k: Array, n: Array) -> BlockLists:
        """What each tile attends to, the estimate included."""
        return fetch_lists(q, k, n, self.config, resolve_backend(self.backend))

    def attend(self, q: Array, k: Array, v: Array, n: Array, lists: BlockLists) -> Array:
        """Attention over the lists."""
        sizes: dict[str, Any] = {"block_size": self.config.block_size, "aligned": True}
        return Listed(lists).attend(q, k, v, n, **sizes, backend=resolve_backend(self.backend))

    def error(self, length: int) -> float:
        """Relative error of the estimate, and of attention over the same lists, against the XLA oracle.

        Not of both together: where two blocks have nearly the same mass, either may be fetched.

        Raises:
            RuntimeError: it is large.
        """
        q, k, v, n = inputs_over(self.mesh, self.layer, length, seed=1)
        q, k, v = self.program(_first_head, INPUTS[:3], INPUTS[:3])(q, k, v)
        asked = (SEQUENCES, SEQUENCES, ROWS)
        lists = self.program(self.lists, asked)(q, k, n)
        found = []
        for one in (self, dataclasses.replace(self, backend="xla")):
            mass = one.program(one.estimate, asked)(q, k, n)
            out = one.program(one.attend, (*INPUTS, CACHES), SEQUENCES)(q, k, v, n, lists)
            found.append((mass, out))
        return agreement(self.backend, *found)


def _first_head(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    return q[:, :, : q.shape[2] // k.shape[2]], k[:, :, :1], v[:, :, :1]
