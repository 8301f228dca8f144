"""Choice of a backend: named ones are taken or refused, "auto" moves on, a tuple is an order of preference."""

import importlib
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import tca_jax.pallas_kernels
from tca_jax.pallas_kernels import backends
from tca_jax.pallas_kernels.backends import (
    BACKENDS,
    OPERATIONS,
    check_backend,
    dispatch,
    resolve_backend,
    validate_backend,
)


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


class _Gpu:
    platform, device_kind = "gpu", "some card"

    def __init__(self, capability):
        self.compute_capability = capability


@pytest.fixture
def gpu(monkeypatch):
    """Makes this machine one with a GPU of a compute capability, as far as the choice of a backend goes."""
    return lambda capability: monkeypatch.setattr(jax, "local_devices", lambda: [_Gpu(capability)])


XLA = {"xla": _takes}
NAMES = r"\['auto', 'cudnn', 'mosaic', 'triton', 'xla'\]"


@pytest.mark.parametrize(
    ("implementations", "backend", "capability", "error", "message"),
    [
        (XLA, "cuda", None, ValueError, rf"backend = 'cuda': must be one of {NAMES}"),
        (XLA, ("xla", "cuda"), None, ValueError, "backend = 'cuda'"),
        (XLA, ("cudnn", "mosaic"), None, ValueError, r"sort has none of these; one must be among \['auto', 'xla'\]"),
        ({"triton": _takes}, "xla", None, ValueError, "sort has no such implementation; must be 'auto' or one of "),
        ({"xla": _refuses}, "xla", None, NotImplementedError, "odd head dim"),
        ({"xla": _refuses}, "auto", None, NotImplementedError, r"sort: no backend takes this call: \['odd head dim'\]"),
        ({"xla": _fails}, "auto", None, ImportError, "no such library"),  # of the call itself: not hidden
        ({"triton": None, **XLA}, "triton", "9.0", ValueError, "sort on triton cannot be imported: .*; use 'auto'"),
        # The first of several that the operation has is as strict as one that is named alone.
        ({"triton": _refuses, **XLA}, ("triton", "auto"), "9.0", NotImplementedError, "odd head dim"),
        ({"triton": _takes, **XLA}, ("triton", "auto"), "7.5", ValueError, "'triton' needs compute capability 8"),
    ],
)
def test_refusals(operation, gpu, implementations, backend, capability, error, message):
    if capability:
        gpu(capability)
    with pytest.raises(error, match=message):
        dispatch(operation(**implementations), backend)(1)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what a CPU lacks")
@pytest.mark.parametrize("name", ["triton", "mosaic", "cudnn"])
def test_backend_that_a_cpu_lacks_is_refused(name):
    with pytest.raises(ValueError, match=f"backend = '{name}' needs an NVIDIA GPU, this process runs on 'cpu'"):
        resolve_backend(name)


@pytest.mark.parametrize(
    ("backend", "capability", "needed"),
    [("mosaic", "8.6", "9.x"), ("mosaic", "10.0", "9.x"), ("triton", "7.5", "8.0 or newer")],
)
def test_gpu_of_another_generation_is_named(gpu, backend, capability, needed):
    gpu(capability)
    message = rf"needs compute capability {needed}, this GPU \(some card\) has {capability}"
    with pytest.raises(ValueError, match=message):
        check_backend(backend)


def test_auto_passes_on_what_is_declined(operation, gpu):
    name = operation(mosaic=_refuses, triton=_refuses, xla=_takes)
    assert dispatch(name, "auto")(1, two=2) == ((1,), {"two": 2})
    gpu("9.0")
    name = operation(cudnn=_refuses, mosaic=None, triton=_takes, xla=_refuses)
    assert dispatch(name, "auto")(1) == ((1,), {})


def test_auto_imports_no_further_backend(operation, gpu, monkeypatch):
    gpu("9.0")
    name, imported = operation(mosaic=_takes, triton=_takes, xla=_takes), []
    load = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda module: imported.append(module) or load(module))
    dispatch(name, "auto")(1)
    assert imported == ["tca_jax.pallas_kernels.sort.mosaic"]


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


@pytest.mark.parametrize(
    ("backend", "meant"),
    [("auto", "auto"), ("xla", "xla"), ("triton", ("triton", "auto")), ("cudnn", ("cudnn", "auto"))],
)
def test_named_backend_of_several_operations(gpu, backend, meant):
    gpu("9.0")
    assert resolve_backend(backend) == meant


@pytest.mark.parametrize("name", OPERATIONS)
def test_table_matches_files_and_signatures(name):
    folder = Path(tca_jax.pallas_kernels.__file__).parent / name
    assert {file.stem for file in folder.glob("*.py")} & set(BACKENDS) == set(OPERATIONS[name])
    public = inspect.signature(getattr(importlib.import_module(f"tca_jax.pallas_kernels.{name}"), name)).parameters
    for backend in OPERATIONS[name]:
        module = importlib.import_module(f"tca_jax.pallas_kernels.{name}.{backend}")
        own = inspect.signature(getattr(module, name)).parameters
        assert [*own][: len(public) - 1] == [*public][:-1], backend
        assert set(own) - set(public) <= {"config", "interpret", "tiles"}, backend


def test_table_has_every_operation_and_valid_names():
    package = Path(tca_jax.pallas_kernels.__file__).parent
    assert {folder.parent.name for folder in package.glob("*/__init__.py")} == set(OPERATIONS)
    for names in OPERATIONS.values():
        assert names[-1] == "xla"
        for name in names:
            validate_backend(name)
