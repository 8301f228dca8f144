"""Every operation on every backend under `jax.vmap` and `jax.shard_map`: the same as a loop over what is mapped."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import abstract_mesh, kernels
from implementations import INTERPRET, implementation, runs
from jax.sharding import PartitionSpec
from operations import COLUMNS, OPERATIONS, packed

from tca_jax.pallas_kernels.backends import OPERATIONS as BACKENDS


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation on one backend, at sizes that the backend takes."""

    operation: str
    backend: str

    def __str__(self):
        return f"{self.operation}-{self.backend}"

    @property
    def dtype(self):
        return jnp.bfloat16 if self.backend in ("cudnn", "mosaic") else jnp.float32

    @property
    def sizes(self):
        block, d = (128, 64) if self.backend in ("cudnn", "mosaic") else (16, 16)
        capacity = 3 * block
        options = {"block_size": block, "window": block, "capacity": capacity, "pool_tokens": 4 * capacity}
        options |= {"spread": 3, "reserve": 5, "m": 5, "tile_size": block, "stride": 4, "b": block, "T": 6}
        options |= {"one": 1, "C": 3, "V": 20, "aligned": self.backend == "mosaic"}
        dims = {"B": 2, "R": 2, "L": 3 * block, "Hq": 4, "Hkv": 2, "d": d, "nb": 3, "N": 3, "P": 4 * capacity, "o": 20}
        return options | dims

    @property
    def operands(self):
        operands = OPERATIONS[self.operation][0]
        if self.backend == "mosaic":  # takes no columns
            return {name: dims for name, dims in operands.items() if name not in COLUMNS}
        return operands | ({"blocks.distances": "B Hq one C"} if COLUMNS.items() <= operands.items() else {})

    @property
    def results(self):
        return OPERATIONS[self.operation][1]

    def function(self, *, interpret: bool) -> Callable[..., tuple[jax.Array, ...]]:
        function = implementation(self.operation, self.backend, interpret=interpret)
        options = {name: self.sizes[name] for name in OPERATIONS[self.operation][2]}

        def call(*operands):
            results = function(**packed(dict(zip(self.operands, operands, strict=True)), 3), **options)
            return tuple(results) if isinstance(results, tuple) else (results,)

        return call

    def draw(self, seed: int) -> list[jax.Array]:
        """Random operands; every region of the pool has room for whole blocks."""
        rng, sizes = np.random.default_rng(seed), self.sizes
        table, regions = (sizes["B"], sizes["Hkv"]), sizes["B"] * sizes["Hkv"]
        offsets = rng.permutation(regions).reshape(table) * sizes["capacity"]
        first = rng.integers(0, 6, sizes["B"]) * sizes["block_size"] + rng.integers(
            0, sizes["block_size"] - 4, sizes["B"]
        )
        heads = (sizes["B"], sizes["Hq"])
        shared = 3 if self.backend == "mosaic" else 1
        begins = rng.integers(1, 2 * sizes["block_size"], (*heads, shared, 3)).clip(sizes["block_size"])
        if sizes["aligned"]:
            begins = begins // sizes["block_size"] * sizes["block_size"]
        begins = np.cumsum(begins, axis=-1)
        tiles = (np.arange(3) + 2) * sizes["block_size"]
        integers = {
            "blocks.distances": begins,
            "blocks.counts": (begins < tiles[:, None]).sum(axis=-1),
            "columns.tokens": np.sort(rng.permuted(np.tile(np.arange(sizes["L"]), (*heads, 1)), axis=-1)[..., :20]),
            "columns.counts": rng.integers(0, 21, heads),
            "lengths": rng.integers(1, sizes["L"] + 1, sizes["B"]),
            "ranked_tokens": rng.integers(0, sizes["L"] + 1, sizes["B"]),
            "budgets": rng.integers(0, sizes["block_size"] + 1, (*table, sizes["nb"])),
            "offsets": offsets,
            "pool.offsets": offsets,
            "pool.lengths": rng.integers(0, sizes["capacity"] + 1, table),
            "caches.table": rng.permutation(sizes["P"])[: regions * 6].reshape(*table, 6),
            "caches.kept": rng.integers(0, sizes["capacity"] + 1, table),
            "caches.start": np.maximum(first // sizes["block_size"] - 1, 0) * sizes["block_size"],
            "caches.end": first + sizes["block_size"],
            "first": first,
            "newest": first + rng.integers(0, 5, sizes["B"]),
        }

        def one(name: str, shape: list[int]) -> jax.Array:
            if name in integers:
                return jnp.asarray(integers[name], jnp.int32)
            drawn = rng.standard_normal(shape)
            return jnp.asarray(np.abs(drawn), jnp.float32) if name == "scores" else jnp.asarray(drawn, self.dtype)

        return [one(name, [sizes[dim] for dim in dims.split()]) for name, dims in self.operands.items()]

    def check(self, actual: jax.Array, expected: jax.Array):
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


def _stack(choices, axes):
    return [
        xs[0] if axis is None else jnp.stack(xs, axis)
        for xs, axis in zip(zip(*choices, strict=True), axes, strict=True)
    ]


def _pick(choices, number, own):
    """Operands of one call of the loop: those of the first choice are shared."""
    return [choices[number if mine else 0][i] for i, mine in enumerate(own)]


def _sharded_axis(dims, over):
    """The axis of an array that is dealt out with the batch or with the heads; every shard has a pool of its own."""
    names = {"batch": ("B", "R", "P"), "heads": ("Hq", "Hkv", "P")}[over]
    return next((i for i, dim in enumerate(dims.split()) if dim in names), None)


def _spec(dims, over):
    axis = _sharded_axis(dims, over)
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "x")


@run
def test_nested_vmap_equals_a_loop(case):
    inner, outer = _axes(case)
    function = case.function(interpret=INTERPRET)
    drawn = [[case.draw(2 * i + j) for j in range(2)] for i in range(2)]
    operands = _stack([_stack(row, inner) for row in drawn], outer)
    actual = jax.jit(jax.vmap(jax.vmap(function, inner), outer))(*operands)
    for i in range(2):
        row = [_pick([row[j] for row in drawn], i, [axis is not None for axis in outer]) for j in range(2)]
        for j in range(2):
            expected = function(*_pick(row, j, [axis is not None for axis in inner]))
            for result, wanted in zip(actual, expected, strict=True):
                case.check(result[i, j], wanted)


@run
@pytest.mark.parametrize("over", [pytest.param("batch", marks=pytest.mark.slow), "heads"])
def test_shard_map_equals_a_loop(case, over):
    devices = min(2, jax.device_count())
    function = case.function(interpret=INTERPRET)
    axes = [_sharded_axis(dims, over) for dims in case.operands.values()]
    drawn = [case.draw(seed) for seed in range(devices)]
    operands = [
        xs[0] if axis is None else jnp.concatenate(xs, axis)
        for xs, axis in zip(zip(*drawn, strict=True), axes, strict=True)
    ]
    sharded = jax.shard_map(
        function,
        mesh=jax.make_mesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=tuple(_spec(dims, over) for dims in case.operands.values()),
        out_specs=tuple(_spec(dims, over) for dims in case.results),
        # JAX's interpreter of Pallas does not track what varies.
        check_vma=not (INTERPRET and case.backend == "triton"),
    )
    shards = [function(*_pick(drawn, i, [axis is not None for axis in axes])) for i in range(devices)]
    for result, parts, dims in zip(jax.jit(sharded)(*operands), zip(*shards, strict=True), case.results, strict=True):
        case.check(result, jnp.concatenate(parts, _sharded_axis(dims, over)))


def _mapped_avals(case, *maps):
    """Operands under vmaps, the innermost first."""
    shapes = [list(x.shape) for x in case.draw(0)]
    for axes in maps:
        for shape, axis in zip(shapes, axes, strict=True):
            shape[axis or 0 : axis or 0] = [] if axis is None else [2]
    return [jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, case.draw(0), strict=True)]


def _globally(case, over, avals):
    """What a mesh of two holds when each of its devices holds `avals`."""
    wholes = []
    for aval, dims in zip(avals, case.operands.values(), strict=True):
        shape, axis = list(aval.shape), _sharded_axis(dims, over)
        if axis is not None:
            shape[axis + len(shape) - len(dims.split())] *= 2
        wholes.append(jax.ShapeDtypeStruct(shape, aval.dtype))
    return wholes


@pytest.fixture
def cudnn_is_found(monkeypatch):
    # JAX asks this machine for its cuDNN even when it lowers for another.
    if INTERPRET:
        monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)


@lower
@pytest.mark.usefixtures("cudnn_is_found")
def test_transforms_lower_to_as_many_kernels(case):
    function = case.function(interpret=False)
    launches = kernels(case.backend, function, *_mapped_avals(case))
    assert launches > 0

    def varies(*operands):
        # JAX would let a result that is not said to vary pass for the same on all devices.
        results = function(*operands)
        assert all(jax.typeof(result).manual_axis_type.varying == {"x"} for result in results)
        return results

    inner, outer = _axes(case)
    mapped = jax.vmap(jax.vmap(function, inner), outer)
    assert kernels(case.backend, mapped, *_mapped_avals(case, inner, outer)) == launches
    first = [0] * len(case.operands)
    for over in ("batch", "heads"):
        specs = [
            tuple(PartitionSpec(None, *_spec(dims, over)) for dims in arrays)
            for arrays in (case.operands.values(), case.results)
        ]
        sharded = jax.shard_map(jax.vmap(varies, first), mesh=abstract_mesh(x=2), in_specs=specs[0], out_specs=specs[1])
        assert kernels(case.backend, sharded, *_globally(case, over, _mapped_avals(case, first))) == launches


def test_cudnn_under_vmap_with_gradients(monkeypatch):
    attend = jax.nn.dot_product_attention
    if INTERPRET:
        on_xla = lambda *args, implementation, **options: attend(*args, implementation="xla", **options)  # noqa: E731
        monkeypatch.setattr(jax.nn, "dot_product_attention", on_xla)
    case = Case("causal_attention", "cudnn")
    call = case.function(interpret=False)
    (q, k, v, lengths), (more_q, _, more_v, _) = case.draw(0), case.draw(1)

    def mapped(q, k, v):
        return jax.vmap(call, (1, None, 0, None))(q, k, v, lengths)[0]

    def loop(q, k, v):
        return jnp.stack([call(q[:, i], k, v[i], lengths)[0] for i in range(2)])

    operands = jnp.stack([q, more_q], 1), k, jnp.stack([v, more_v])
    case.check(jax.jit(mapped)(*operands), jax.jit(loop)(*operands))
    gradients = [
        jax.jit(jax.grad(lambda *x, f=f: (f(*x).astype(jnp.float32) ** 2).sum(), argnums=(0, 1, 2)))(*operands)
        for f in (mapped, loop)
    ]
    for ours, expected in zip(*gradients, strict=True):
        scale = float(jnp.abs(expected).max())
        np.testing.assert_allclose(*(np.asarray(x, np.float32) / scale for x in (ours, expected)), atol=1e-2)
