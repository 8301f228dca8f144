"""Choice of a backend: named ones are taken or refused, "auto" moves on, a tuple is an order of preference."""

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import tca_jax.pallas_kernels
from tca_jax.pallas_kernels import backends
from tca_jax.pallas_kernels.backends import BACKENDS, OPERATIONS, check_backend, dispatch, resolve_backend


def _refuses(*args, **kwargs):
    raise NotImplementedError("odd head dim")


def _takes(*args, **kwargs):
    return args, kwargs


def _fails(*args, **kwargs):
    raise ImportError("no such library")


@pytest.fixture
def operation(monkeypatch):
    """Declares an operation "sort" with these implementations, best first; None is one that cannot be imported."""

    def declare(**implementations):
        monkeypatch.setattr(backends, "OPERATIONS", {"sort": tuple(implementations)})
        for name, function in implementations.items():
            module = None if function is None else SimpleNamespace(sort=function)
            monkeypatch.setitem(sys.modules, f"tca_jax.pallas_kernels.sort.{name}", module)
        monkeypatch.setitem(sys.modules, "tca_jax.pallas_kernels.sort", SimpleNamespace(__path__=[]))
        return "sort"

    return declare


@pytest.fixture
def gpu(monkeypatch):
    """Makes this machine one with a GPU of a compute capability, or without, as far as backends are chosen."""

    def device(capability):
        platform = "gpu" if capability else "cpu"
        return SimpleNamespace(platform=platform, device_kind="some card", compute_capability=capability)

    return lambda capability: monkeypatch.setattr(jax, "local_devices", lambda: [device(capability)])


XLA = {"xla": _takes}
NAMES = r"\['auto', 'cudnn', 'mosaic', 'triton', 'xla'\]"


@pytest.mark.parametrize(
    ("implementations", "backend", "capability", "error", "message"),
    [
        (XLA, "cuda", None, ValueError, rf"backend = 'cuda': must be one of {NAMES}"),
        (XLA, ("xla", "cuda"), None, ValueError, "backend = 'cuda'"),
        (XLA, ("cudnn", "mosaic"), None, ValueError, r"sort has no such implementation; must be one of \['auto', 'xl"),
        ({"xla": _refuses}, "xla", None, NotImplementedError, "odd head dim"),
        ({"xla": _refuses}, "auto", None, NotImplementedError, r"sort: no backend takes this call: \['odd head dim'\]"),
        ({"xla": _fails}, "auto", None, ImportError, "no such library"),  # of the call itself: not hidden
        ({"triton": None, **XLA}, "triton", "9.0", ValueError, "sort on triton cannot be imported: .*; use 'auto'"),
        # The first of several that the operation has is as strict as one that is named alone.
        ({"triton": _refuses, **XLA}, ("triton", "auto"), "9.0", NotImplementedError, "odd head dim"),
        (
            {"triton": _takes, **XLA},
            ("triton", "auto"),
            "7.5",
            ValueError,
            "capability 8.0 or newer, .* has 7.5",
        ),
    ],
)
def test_refusals(operation, gpu, implementations, backend, capability, error, message):
    gpu(capability)
    with pytest.raises(error, match=message):
        dispatch(operation(**implementations), backend)(1)


@pytest.mark.parametrize(
    ("backend", "capability", "needed"),
    [
        *((name, None, "an NVIDIA GPU, this process runs on 'cpu'") for name in ("triton", "mosaic", "cudnn")),
        ("mosaic", "8.6", r"compute capability 9.x, this GPU \(some card\) has 8.6"),
        ("mosaic", "10.0", r"compute capability 9.x, this GPU \(some card\) has 10.0"),
    ],
)
def test_what_the_device_lacks_is_named(gpu, backend, capability, needed):
    gpu(capability)
    for check in (check_backend, resolve_backend):
        with pytest.raises(ValueError, match=f"backend = '{backend}' needs {needed}"):
            check(backend)


def test_auto_passes_on_what_is_declined(operation, gpu):
    name = operation(mosaic=_refuses, triton=_refuses, xla=_takes)
    assert dispatch(name, "auto")(1, two=2) == ((1,), {"two": 2})
    gpu("9.0")
    name = operation(cudnn=_refuses, mosaic=None, triton=_takes, xla=None)  # the last is not even imported
    assert dispatch(name, "auto")(1) == ((1,), {})


@pytest.mark.parametrize(
    ("backend", "capability", "taken"),
    [
        ("auto", "7.5", "xla"),
        ("auto", "8.0", "triton"),
        ("auto", "9.0", "mosaic"),
        ("auto", "10.3", "triton"),
        (("cudnn", "mosaic", "triton"), "9.0", "mosaic"),
        (("cudnn", "auto"), "9.0", "mosaic"),
        (("triton", "auto"), "9.0", "triton"),
        (("xla",), "9.0", "xla"),
    ],
)
def test_backend_of_a_gpu(operation, gpu, backend, capability, taken):
    gpu(capability)
    table = {name: lambda name=name: name for name in ("mosaic", "triton", "xla")}
    assert dispatch(operation(**table), backend)() == taken


def test_named_backend_of_several_operations(gpu):
    gpu("9.0")
    meant = {"auto": "auto", "xla": "xla", "triton": ("triton", "auto"), "cudnn": ("cudnn", "auto")}
    assert {name: resolve_backend(name) for name in meant} == meant


@pytest.mark.parametrize("name", OPERATIONS)
def test_table_matches_files_and_signatures(name):
    package = Path(tca_jax.pallas_kernels.__file__).parent
    assert {folder.parent.name for folder in package.glob("*/__init__.py")} == set(OPERATIONS)
    assert {file.stem for file in (package / name).glob("*.py")} & set(BACKENDS) == set(OPERATIONS[name])
    assert OPERATIONS[name][-1] == "xla"
    public = inspect.signature(getattr(importlib.import_module(f"tca_jax.pallas_kernels.{name}"), name)).parameters
    for backend in OPERATIONS[name]:
        module = importlib.import_module(f"tca_jax.pallas_kernels.{name}.{backend}")
        own = inspect.signature(getattr(module, name)).parameters
        assert [*own][: len(public) - 1] == [*public][:-1], backend
        assert set(own) - set(public) <= {"config", "interpret", "tiles"}, backend


PROGRAM = """
import sys, types

for language in ("triton", "mosaic_gpu"):
    sys.modules[f"jax.experimental.pallas.{language}"] = None  # any import of it raises ImportError

import jax
import jax.numpy as jnp

import tca_jax
from tca_jax.pallas_kernels.causal_attention import causal_attention

config = tca_jax.TCAConfig(block_size=8, window=16)
q, k = jnp.ones((1, 64, 2, 16)), jnp.ones((1, 64, 1, 16))
candidates, lengths = jnp.array([3]), jnp.array([64])
assert tca_jax.select(q[:, -1], k, candidates, lengths, config, backend="auto").any()
assert jnp.allclose(tca_jax.attend(q, k, k, candidates, lengths, config, backend="auto"), 1)
gpu = types.SimpleNamespace(platform="gpu", device_kind="some card", compute_capability="9.0")
jax.local_devices = lambda: [gpu]  # from here on a GPU's backends are tried
for backend in ("triton", "mosaic"):
    try:
        causal_attention(q, k, k, lengths, backend=backend)
    except ValueError as error:
        print(error)
"""


@pytest.mark.integration
def test_missing_kernel_languages_are_named():
    options = {"capture_output": True, "text": True, "env": {**os.environ, "JAX_PLATFORMS": "cpu"}}
    done = subprocess.run([sys.executable, "-c", PROGRAM], **options, check=False)
    assert done.returncode == 0, done.stderr
    for name, line in zip(("triton", "mosaic"), done.stdout.splitlines(), strict=True):
        assert re.fullmatch(
            rf"backend = '{name}': causal_attention on {name} cannot be imported: .*; use 'auto'.*", line
        )
