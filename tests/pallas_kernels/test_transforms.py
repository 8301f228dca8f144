"""Every operation on every backend under `jax.vmap`, the same as a loop, and lowered under `jax.shard_map` too."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import abstract_mesh, kernels
from implementations import INTERPRET, implementation, runs
from jax.sharding import PartitionSpec
from operations import FAR, OPERATIONS, packed

from tca_jax.pallas_kernels.backends import OPERATIONS as BACKENDS


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation on one backend, at sizes that the backend takes."""

    operation: str
    backend: str

    def __str__(self):
        return f"{self.operation}-{self.backend}"

    @property
    def is_native(self):
        return self.backend in ("cudnn", "mosaic")  # these take half precision and large blocks alone

    @property
    def dtype(self):
        return jnp.bfloat16 if self.is_native else jnp.float32

    @property
    def sizes(self):
        block, d = (128, 64) if self.is_native else (16, 16)
        capacity = 3 * block
        options = {"block_size": block, "window": block, "capacity": capacity, "pool_tokens": 4 * capacity}
        options |= {"m": 5, "stride": 4, "b": block, "T": 6}
        dims = {"B": 2, "R": 2, "L": 3 * block, "Hq": 4, "Hkv": 2, "d": d, "nb": 3, "N": 3, "P": 4 * capacity}
        return options | dims

    @property
    def operands(self):
        return {name: dims for name, dims in OPERATIONS[self.operation][0].items() if name not in FAR}

    @property
    def results(self):
        return OPERATIONS[self.operation][1]

    def function(self, *, interpret):
        function = implementation(self.operation, self.backend, interpret=interpret)
        options = {name: self.sizes[name] for name in OPERATIONS[self.operation][2]}

        def call(*operands):
            results = function(**packed(dict(zip(self.operands, operands, strict=True)), 3), **options)
            return tuple(results) if isinstance(results, tuple) else (results,)

        return call

    def draw(self, seed):
        """Random operands; every region of the pool has room for whole blocks."""
        rng, sizes = np.random.default_rng(seed), self.sizes
        batch, block, capacity = sizes["B"], sizes["block_size"], sizes["capacity"]
        table = (batch, sizes["Hkv"])
        regions = batch * sizes["Hkv"]
        offsets = rng.permutation(regions).reshape(table) * capacity
        first = rng.integers(0, 6, batch) * block + rng.integers(0, block - 4, batch)
        integers = {
            "lengths": rng.integers(1, sizes["L"] + 1, batch),
            "budgets": rng.integers(0, block + 1, (*table, sizes["nb"])),
            "offsets": offsets,
            "pool.offsets": offsets,
            "pool.lengths": rng.integers(0, capacity + 1, table),
            "caches.table": rng.permutation(sizes["P"])[: regions * 6].reshape(*table, 6),
            "caches.kept": rng.integers(0, capacity + 1, table),
            "caches.start": np.maximum(first // block - 1, 0) * block,
            "caches.end": first + block,
            "first": first,
            "newest": first + rng.integers(0, 5, batch),
        }

        def one(name, shape):
            if name in integers:
                return jnp.asarray(integers[name], jnp.int32)
            drawn = rng.standard_normal(shape)
            return jnp.asarray(np.abs(drawn), jnp.float32) if name == "scores" else jnp.asarray(drawn, self.dtype)

        return [one(name, [sizes[dim] for dim in dims.split()]) for name, dims in self.operands.items()]

    def check(self, actual, expected):
        tolerance = 1e-4 if self.dtype == jnp.float32 else 1e-2
        pair = (np.asarray(x, np.float32) for x in (actual, expected))
        np.testing.assert_allclose(*pair, atol=tolerance, rtol=tolerance)


CASES = [Case(operation, backend) for operation in OPERATIONS for backend in BACKENDS[operation]]
run = pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=pytest.mark.skipif(not runs(c.backend), reason="needs another GPU")) for c in CASES],
    ids=str,
)
lower = pytest.mark.parametrize("case", [case for case in CASES if case.backend != "xla"], ids=str)


def _axes(case):
    """Of an inner and an outer vmap: the axis of every operand, None for one that is shared."""
    count = len(case.operands)
    return [(0, None, 1)[i % 3] for i in range(count)], [(None, 1, 0, 0)[i % 4] for i in range(count)]


def _join(choices, axes, join):
    """Operands of several draws as one, joined along the axis of each; those without an axis are shared."""
    parts = zip(zip(*choices, strict=True), axes, strict=True)
    return [xs[0] if axis is None else join(xs, axis) for xs, axis in parts]


def _nested(case):
    """Operands of an inner and an outer vmap, and what each call of the loop takes."""
    inner, outer = _axes(case)
    drawn = [[case.draw(2 * i + j) for j in range(2)] for i in range(2)]
    operands = _join([_join(row, inner, jnp.stack) for row in drawn], outer, jnp.stack)
    axes = list(zip(inner, outer, strict=True))
    calls = {
        (i, j): [drawn[i * (b is not None)][j * (a is not None)][n] for n, (a, b) in enumerate(axes)]
        for i, j in np.ndindex(2, 2)
    }
    return operands, calls


def _shards(case, over):
    """Operands of two devices, of each alone and joined, and the axes of operands and results that are dealt out."""
    names = {"batch": ("B", "R", "P"), "heads": ("Hq", "Hkv", "P")}[over]  # every device has a pool of its own

    def axis(dims):
        return next((i for i, dim in enumerate(dims.split()) if dim in names), None)

    axes = [axis(dims) for dims in case.operands.values()]
    drawn = [case.draw(seed) for seed in range(2)]
    alone = [[drawn[i * (axis is not None)][n] for n, axis in enumerate(axes)] for i in range(2)]
    return alone, _join(drawn, axes, jnp.concatenate), axes, [axis(dims) for dims in case.results]


def _specs(axes, mapped=0):
    whole = [None] * mapped
    return tuple(PartitionSpec() if axis is None else PartitionSpec(*whole, *[None] * axis, "x") for axis in axes)


@run
def test_nested_vmap_equals_a_loop(case):
    (inner, outer), (operands, calls), function = _axes(case), _nested(case), case.function(interpret=INTERPRET)
    actual = jax.jit(jax.vmap(jax.vmap(function, inner), outer))(*operands)
    for place, own in calls.items():
        for result, wanted in zip(actual, function(*own), strict=True):
            case.check(result[place], wanted)


@pytest.fixture
def cudnn_is_found(monkeypatch):
    # JAX asks this machine for its cuDNN even when it lowers for another.
    if INTERPRET:
        monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)


@lower
@pytest.mark.usefixtures("cudnn_is_found")
def test_transforms_lower_to_as_many_kernels(case):
    function, (inner, outer) = case.function(interpret=False), _axes(case)
    launches = kernels(case.backend, function, *case.draw(0))
    assert launches > 0
    mapped = jax.vmap(jax.vmap(function, inner), outer)
    assert kernels(case.backend, mapped, *_nested(case)[0]) == launches

    def varies(*operands):
        # JAX would let a result that is not said to vary pass for the same on all devices.
        results = function(*operands)
        assert all(jax.typeof(result).manual_axis_type.varying == {"x"} for result in results)
        return results

    for over in ("batch", "heads"):
        _, operands, axes, results = _shards(case, over)
        specs = {"in_specs": _specs(axes, mapped=1), "out_specs": _specs(results, mapped=1)}
        sharded = jax.shard_map(jax.vmap(varies), mesh=abstract_mesh(x=2), **specs)
        avals = [jax.ShapeDtypeStruct((2, *x.shape), x.dtype) for x in operands]
        assert kernels(case.backend, sharded, *avals) == launches
