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

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what a CPU lacks")


def _refuses(*args, **kwargs):
    raise NotImplementedError("odd head dim")


def _takes(*args, **kwargs):
    return args, kwargs


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


def test_unknown_name_is_refused_with_the_list(operation):
    with pytest.raises(
        ValueError, match=r"backend = 'cuda': must be one of \['auto', 'cudnn', 'mosaic', 'triton', 'xla'\]"
    ):
        validate_backend("cuda")
    with pytest.raises(ValueError, match="backend = 'XLA'"):
        dispatch(operation(xla=_takes), "XLA")
    with pytest.raises(ValueError, match="backend = 'cuda'"):
        dispatch(operation(xla=_takes), ("xla", "cuda"))


def test_every_listed_name_is_valid():
    for name in BACKENDS:
        validate_backend(name)


@on_cpu
@pytest.mark.parametrize("name", ["triton", "mosaic"])
def test_named_backend_that_the_device_cannot_run_is_refused(operation, name):
    message = f"backend = '{name}' needs an NVIDIA GPU, this process runs on 'cpu'"
    with pytest.raises(ValueError, match=message):
        dispatch(operation(**{name: _takes, "xla": _takes}), name)
    with pytest.raises(ValueError, match=message):
        resolve_backend(name)


def test_named_backend_without_an_implementation_is_refused(operation):
    with pytest.raises(ValueError, match=r"sort has no such implementation; must be 'auto' or one of \['triton'\]"):
        dispatch(operation(triton=_takes), "xla")


def test_named_backend_that_declines_a_call_is_an_error(operation):
    with pytest.raises(NotImplementedError, match="odd head dim"):
        dispatch(operation(xla=_refuses), "xla")(1)


def test_named_backend_that_cannot_be_imported_is_an_error_that_says_so(operation, gpu):
    gpu("9.0")
    with pytest.raises(ValueError, match=r"backend = 'triton': sort on triton cannot be imported: .*; use 'auto'"):
        dispatch(operation(triton=None, xla=_takes), "triton")


def test_auto_passes_the_call_to_a_backend_the_device_can_run(operation):
    name = operation(mosaic=_refuses, triton=_refuses, xla=_takes)
    assert dispatch(name, "auto")(1, two=2) == ((1,), {"two": 2})


def test_auto_passes_over_a_backend_that_cannot_be_imported_or_declines(operation, gpu):
    gpu("9.0")
    name = operation(cudnn=_refuses, mosaic=None, triton=_takes, xla=_refuses)
    assert dispatch(name, "auto")(1) == ((1,), {})


def test_auto_imports_no_backend_that_it_does_not_come_to(operation, gpu, monkeypatch):
    gpu("9.0")
    name, imported = operation(mosaic=_takes, triton=_takes, xla=_takes), []
    load = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda module: imported.append(module) or load(module))
    dispatch(name, "auto")(1)
    assert imported == ["tca_jax.pallas_kernels.sort.mosaic"]


def test_an_import_error_of_the_call_itself_is_not_hidden(operation):
    def broken():
        raise ImportError("no such library")

    with pytest.raises(ImportError, match="no such library"):
        dispatch(operation(xla=broken), "auto")()


def test_auto_fails_with_the_reasons_when_all_decline(operation):
    with pytest.raises(NotImplementedError, match=r"sort: no backend takes this call: \['odd head dim'\]"):
        dispatch(operation(xla=_refuses), "auto")()


@pytest.mark.parametrize(
    ("capability", "taken"), [("7.5", "xla"), ("8.0", "triton"), ("9.0", "mosaic"), ("10.3", "triton")]
)
def test_auto_takes_the_best_backend_of_a_gpu(operation, gpu, capability, taken):
    gpu(capability)
    table = {name: lambda name=name: name for name in ("mosaic", "triton", "xla")}
    assert dispatch(operation(**table), "auto")() == taken


@pytest.mark.parametrize(
    ("backend", "taken"),
    [
        (("cudnn", "mosaic", "triton"), "mosaic"),
        (("cudnn", "auto"), "mosaic"),
        (("triton", "auto"), "triton"),
        (("xla",), "xla"),
    ],
)
def test_the_first_of_several_names_that_the_operation_has_is_meant(operation, gpu, backend, taken):
    gpu("9.0")
    table = {name: lambda name=name: name for name in ("mosaic", "triton", "xla")}
    assert dispatch(operation(**table), backend)() == taken


def test_names_that_the_operation_has_none_of_are_refused(operation):
    with pytest.raises(
        ValueError,
        match=r"backend = \('cudnn', 'mosaic'\): sort has none of these; one must be among \['auto', 'xla'\]",
    ):
        dispatch(operation(xla=_takes), ("cudnn", "mosaic"))


def test_a_preferred_backend_is_as_strict_as_a_named_one(operation, gpu):
    gpu("9.0")
    with pytest.raises(NotImplementedError, match="odd head dim"):
        dispatch(operation(triton=_refuses, xla=_takes), ("triton", "auto"))()
    gpu("7.5")
    with pytest.raises(ValueError, match="backend = 'triton' needs compute capability 8"):
        dispatch(operation(triton=_takes, xla=_takes), ("triton", "auto"))


@pytest.mark.parametrize(
    ("backend", "meant"),
    [("auto", "auto"), ("xla", "xla"), ("triton", ("triton", "auto")), ("cudnn", ("cudnn", "auto"))],
)
def test_a_whole_takes_the_named_backend_where_an_operation_has_it(gpu, backend, meant):
    gpu("9.0")
    assert resolve_backend(backend) == meant


@pytest.mark.parametrize(
    ("backend", "capability", "needed"),
    [("mosaic", "8.6", "9.x"), ("mosaic", "10.0", "9.x"), ("triton", "7.5", "8.0 or newer")],
)
def test_a_gpu_of_another_generation_is_named(gpu, backend, capability, needed):
    gpu(capability)
    with pytest.raises(
        ValueError, match=rf"needs compute capability {needed}, this GPU \(some card\) has {capability}"
    ):
        check_backend(backend)


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_table_names_the_files_of_an_operation_and_their_functions_take_the_same_arguments(name):
    folder = Path(tca_jax.pallas_kernels.__file__).parent / name
    assert {file.stem for file in folder.glob("*.py")} & set(BACKENDS) == set(OPERATIONS[name])
    public = inspect.signature(getattr(importlib.import_module(f"tca_jax.pallas_kernels.{name}"), name)).parameters
    for backend in OPERATIONS[name]:
        module = importlib.import_module(f"tca_jax.pallas_kernels.{name}.{backend}")
        own = inspect.signature(getattr(module, name)).parameters
        assert [*own][: len(public) - 1] == [*public][:-1], backend
        assert set(own) - set(public) <= {"config", "interpret", "tiles"}, backend


def test_the_table_has_every_operation():
    package = Path(tca_jax.pallas_kernels.__file__).parent
    assert {folder.parent.name for folder in package.glob("*/__init__.py")} == set(OPERATIONS)
    assert all(names[-1] == "xla" for names in OPERATIONS.values())
