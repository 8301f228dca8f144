"""One layer's prefill under the block-sparse methods, their estimates included, at a share of all pairs.

A part of `tca-jax bench attention`, where it is asked for:

tca-jax bench attention --methods minference --methods flexprefill --methods xattention --attended 0.18
tca-jax bench attention --methods xattention=0.9    # at a value of the method's knob
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from tca_jax import methods
from tca_jax.engine.mesh import CACHES, HeadShards, heads_of, mesh_entry
from tca_jax.errors import UserError
from tca_jax.lab.benchmarks.common import (
    CHECKED_TOKENS,
    Layer,
    agreement,
    full_attention,
    time_alternating,
)
from tca_jax.lab.benchmarks.layer_mesh import INPUTS, SEQUENCES, heads_over, inputs_over, program_over
from tca_jax.methods.block_sparse import BlockSparsePrefill, Listed, listed_pairs
from tca_jax.methods.full import BASELINE
from tca_jax.methods.pairs import causal_pairs

_STEPS, _CLOSE = 12, 0.003  # of the search for a knob's value


@dataclasses.dataclass(frozen=True)
class Knob:
    """The option that moves a method's area.

    Attributes:
        option: Its name.
        low: Least value to try; the area grows with it.
        high: Largest value to try.
        others: Options that keep short prompts from being attended to exactly.
    """

    option: str
    low: float
    high: float
    others: Mapping[str, Any]


KNOBS: Mapping[str, Knob] = MappingProxyType(
    {
        "minference": Knob("scale", 1e-3, 30.0, MappingProxyType({"dense_tokens": 0})),
        "flexprefill": Knob("gamma", 0.01, 1.0, MappingProxyType({"min_budget": 128})),
        "xattention": Knob("threshold", 0.01, 1.0, MappingProxyType({"dense_tokens": 0})),
    }
)


class Wanted(NamedTuple):
    """A method, and the value of its knob; None: the one that gives the wanted area."""

    name: str
    value: float | None

    @classmethod
    def parse(cls, text: str) -> Wanted:
        """From "name" or "name=value".

        Raises:
            ValueError: it is neither, or the method has no such knob.
        """
        name, _, value = text.partition("=")
        if name not in KNOBS:
            raise UserError(
                f"--methods {text}: must be one of {list(KNOBS)}, or one with a value such as xattention=0.9"
            )
        try:
            wanted = cls(name, float(value) if value else None)
        except ValueError:
            raise UserError(f"--methods {text}: {value!r} is no number") from None
        if wanted.value is not None:
            wanted.policy(wanted.value)  # says what is wrong with a value
        return wanted

    def policy(self, value: float) -> BlockSparsePrefill:
        """The method's prefill policy at a value of its knob."""
        knob = KNOBS[self.name]
        policy = methods.get(self.name, **{knob.option: value}, **knob.others).prefill
        assert isinstance(policy, BlockSparsePrefill)
        return policy


def check_attended(attended: float) -> None:
    """Raises ValueError unless it is a share of all pairs."""
    if not 0 < attended <= 1:
        raise UserError(f"--attended {attended}: must lie in (0, 1]")


def measure_methods(
    layer: Layer, length: int, wanted: Sequence[Wanted], attended: float, repeats: int, mesh: Mesh | None = None
) -> list[dict[str, Any]]:
    """A row for each method; all take turns with full attention on the same inputs."""
    inputs = inputs_over(mesh, layer, length, seed=length)
    program, shards = partial(program_over, mesh), heads_over(mesh, BASELINE.cache, layer.kv_heads)
    full = program(full_attention, INPUTS[:3], SEQUENCES)
    calls: dict[Any, Callable[[], Any]] = {"full": lambda: full(*inputs[:3])}
    rows: dict[Wanted, dict[str, Any]] = {}
    for each in wanted:
        value, knob = each.value, KNOBS[each.name]
        if value is None:
            value = find_value(partial(_area_of, program, shards, each, inputs), attended, knob.low, knob.high)
        policy = each.policy(value)
        estimate = program(partial(_estimate, policy, shards), INPUTS)
        attend = program(partial(_attend, policy, "auto"), (*INPUTS, CACHES), SEQUENCES)
        listed = estimate(*inputs)
        calls[each, "whole"] = partial(program(partial(_whole, policy, shards), INPUTS, SEQUENCES), *inputs)
        calls[each, "estimate"] = partial(estimate, *inputs)
        calls[each, "attention"] = partial(attend, *inputs, listed)
        rows[each] = {
            "model": layer.name,
            **mesh_entry(mesh),
            "tokens": length,
            "method": each.name,
            "knob": f"{knob.option} {value:.3g}",
            "area": float(_area(policy, listed, inputs[3])),
            "error": _check(program, shards, policy, inputs_over(mesh, layer, min(length, CHECKED_TOKENS), seed=1)),
        }
    seconds = time_alternating(calls, repeats)
    flops = 4 * layer.head_dim * layer.heads * inputs[0].shape[0] * length**2 / 2
    for each, row in rows.items():
        whole, error = seconds[each, "whole"], row.pop("error")
        row |= {"full ms": 1e3 * seconds["full"], "speed-up": seconds["full"] / whole, "method ms": 1e3 * whole}
        row |= {f"{stage} ms": 1e3 * seconds[each, stage] for stage in ("estimate", "attention")}
        row["TFLOP/s on area"] = flops * row["area"] / seconds[each, "attention"] / 1e12
        row["error"] = error
    return list(rows.values())


def describe_methods(attended: float) -> str:
    """What the columns of their table mean."""
    return (
        "The second table has other methods' prefill on the same inputs, the knob of each set so that the computed "
        f"area is {100 * attended:g}%, unless its value is given: `method ms` is the whole of it in one program, "
        "`estimate ms` what decides on blocks and columns, and `attention ms` the attention over them."
    )


def _whole(policy: BlockSparsePrefill, shards: HeadShards | None, q: Array, k: Array, v: Array, n: Array) -> Array:
    return policy.attend(0, heads_of(shards, 0, k.shape[2]), q, k, v, n, None, "auto").out


def _estimate(
    policy: BlockSparsePrefill, shards: HeadShards | None, q: Array, k: Array, v: Array, n: Array
) -> tuple[Listed, ...]:
    return policy.listed(0, heads_of(shards, 0, k.shape[2]), q, k, n)


def _attend(
    policy: BlockSparsePrefill, backend: str, q: Array, k: Array, v: Array, n: Array, listed: tuple[Listed, ...]
) -> Array:
    return policy.attend_listed(q, k, v, listed, n, backend)


def find_value(area_of: Callable[[float], float], area: float, low: float, high: float) -> float:
    """The value between two others whose area, which grows with it, is nearest to the wanted one.

    Each value costs a compilation: what follows is where a power law through the last two has the wanted area, or the
    middle where that leaves the bracket.
    """
    tried: list[tuple[float, float]] = []
    for _ in range(_STEPS):
        value = math.sqrt(low * high)
        if len(tried) > 1 and 0 < tried[-1][1] != tried[-2][1] > 0:
            (x, of_x), (y, of_y) = [(math.log(value), math.log(got)) for value, got in tried[-2:]]
            guess = math.exp(y + (math.log(area) - of_y) * (y - x) / (of_y - of_x))
            value = guess if low < guess < high else value
        got = area_of(value)
        tried.append((value, got))
        if abs(got - area) < _CLOSE:
            break
        low, high = (value, high) if got < area else (low, value)
    return min(reversed(tried), key=lambda one: abs(one[1] - area))[0]


def _area_of(
    program: Callable[..., Any], shards: HeadShards | None, wanted: Wanted, inputs: tuple[Array, ...], value: float
) -> float:
    """What a method computes at a value of its knob."""
    policy = wanted.policy(value)
    estimate = program(partial(_estimate, policy, shards), INPUTS)
    return float(jax.jit(lambda *args: _area(policy, estimate(*args), args[-1]))(*inputs))


def _area(policy: BlockSparsePrefill, listed: tuple[Listed, ...], n: Array) -> Array:
    """Share of the causal triangle that is attended to, mean over rows and heads."""
    return jnp.mean(listed_pairs(listed, n, policy.block_size) / causal_pairs(n)[:, None])


def _check(
    program: Callable[..., Any], shards: HeadShards | None, policy: BlockSparsePrefill, inputs: tuple[Array, ...]
) -> float:
    """Relative error against the XLA oracle over the same lists."""
    listed = program(partial(_estimate, policy, shards), INPUTS)(*inputs)
    attends = [program(partial(_attend, policy, name), (*INPUTS, CACHES), SEQUENCES) for name in ("auto", "xla")]
    return agreement("block_sparse_attention", *(attend(*inputs, listed) for attend in attends))
