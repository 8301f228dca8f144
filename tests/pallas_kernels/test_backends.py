"""Choice of a backend: named ones are taken or refused, "auto" moves on, a tuple is an order of preference."""

import dataclasses
import sys
from types import SimpleNamespace

import jax
import pytest
import tiny

from tca_jax.pallas_kernels import backends
from tca_jax.pallas_kernels.backends import dispatch, resolve_backend
from tca_jax.pallas_kernels.prefill_attention import mosaic_fp8


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


@pytest.mark.parametrize(
    ("implementations", "backend", "capability", "error", "message"),
    [
        (XLA, "cuda", None, ValueError, "backend = 'cuda': sort has no such implementation"),
        (XLA, ("cudnn", "mosaic"), None, ValueError, r"sort has no such implementation; must be one of \['auto', 'xl"),
        ({"xla": _refuses}, "xla", None, NotImplementedError, "odd head dim"),
        ({"xla": _refuses}, "auto", None, NotImplementedError, r"sort: no backend takes this call: \['odd head dim'\]"),
        ({"xla": _fails}, "auto", None, ImportError, "no such library"),  # of the call itself: not hidden
        ({"triton": None, **XLA}, "triton", "9.0", ValueError, "sort on triton cannot be imported: .*; use 'auto'"),
        # The first of several that the operation has is as strict as one that is named alone.
        ({"triton": _refuses, **XLA}, ("triton", "auto"), "9.0", NotImplementedError, "odd head dim"),
        ({"triton": _takes, **XLA}, ("triton", "auto"), "7.5", ValueError, "capability 8.0 or newer, .* has 7.5"),
    ],
)
def test_refusals(operation, gpu, implementations, backend, capability, error, message):
    gpu(capability)
    with pytest.raises(error, match=message):
        dispatch(operation(**implementations), backend)(1)


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
    with pytest.raises(ValueError, match=r"backend = 'cuda': must be one of \['auto', 'cudnn', "):
        resolve_backend("cuda")


def test_eight_bits_are_taken_where_they_are_named(gpu):
    gpu("9.0")
    lm = tiny.tiny_lm()
    assert lm.kernels("auto") == "auto"
    named = dataclasses.replace(lm, attention="fp8").kernels("auto")
    assert dispatch("prefill_attention", named) is mosaic_fp8.prefill_attention
    assert dispatch("select_tokens", named) is not mosaic_fp8.prefill_attention
    assert dataclasses.replace(lm, attention="fp8").kernels("triton") == ("triton", "auto")
    with pytest.raises(ValueError, match=r"takes heads of 64 or 128 .* has 16 in float32; pass dtype"):
        tiny.tiny_lm(attention="fp8")
    gpu("8.0")
    with pytest.raises(ValueError, match=r"'mosaic_fp8' needs compute capability 9.x, this GPU \(some card\) has 8.0"):
        dispatch("prefill_attention", named)
