"""Choice of a backend: named ones are taken or refused, "auto" moves on."""

import importlib

import jax
import pytest

from tca_jax.pallas_kernels.backends import BACKENDS, backend_for, dispatch, validate_backend

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what a CPU lacks")


def _refuses(*args, **kwargs):
    raise NotImplementedError("odd head dim")


def _takes(*args, **kwargs):
    return args, kwargs


def test_unknown_name_is_refused_with_the_list():
    with pytest.raises(
        ValueError, match=r"backend = 'cuda': must be one of \['auto', 'cudnn', 'mosaic', 'triton', 'xla'\]"
    ):
        validate_backend("cuda")
    with pytest.raises(ValueError, match="backend = 'XLA'"):
        dispatch("token_scores", "XLA", {"xla": _takes})


def test_every_listed_name_is_valid():
    for name in BACKENDS:
        validate_backend(name)


@on_cpu
@pytest.mark.parametrize("name", ["triton", "mosaic"])
def test_named_backend_that_the_device_cannot_run_is_refused(name):
    with pytest.raises(ValueError, match=f"backend = '{name}' needs an NVIDIA GPU, this process runs on 'cpu'"):
        dispatch("token_scores", name, {"xla": _takes, name: _takes})


def test_named_backend_without_an_implementation_is_refused():
    with pytest.raises(ValueError, match="token_scores has no such implementation"):
        dispatch("token_scores", "xla", {})


def test_named_backend_that_declines_a_call_is_an_error():
    with pytest.raises(NotImplementedError, match="odd head dim"):
        dispatch("token_scores", "xla", {"xla": _refuses})(1)


def test_auto_passes_the_call_to_a_backend_the_device_can_run():
    usable = {"xla": _takes, "triton": _refuses, "mosaic": _refuses}
    assert dispatch("token_scores", "auto", usable)(1, two=2) == ((1,), {"two": 2})


def test_auto_fails_with_the_reasons_when_all_decline():
    with pytest.raises(NotImplementedError, match=r"token_scores: no backend takes this call: \['odd head dim'\]"):
        dispatch("token_scores", "auto", {"xla": _refuses})()


class _Gpu:
    platform, device_kind = "gpu", "some card"

    def __init__(self, capability):
        self.compute_capability = capability


@pytest.mark.parametrize(
    ("capability", "taken"), [("7.5", "xla"), ("8.0", "triton"), ("9.0", "mosaic"), ("10.3", "triton")]
)
def test_auto_takes_the_best_backend_of_a_gpu(monkeypatch, capability, taken):
    monkeypatch.setattr(jax, "local_devices", lambda: [_Gpu(capability)])
    table = {name: lambda name=name: name for name in ("xla", "triton", "mosaic")}
    assert dispatch("token_scores", "auto", table)() == taken


@pytest.mark.parametrize(
    ("backend", "capability", "needed"),
    [("mosaic", "8.6", "9.x"), ("mosaic", "10.0", "9.x"), ("triton", "7.5", "8.0 or newer")],
)
def test_a_gpu_of_another_generation_is_named(monkeypatch, backend, capability, needed):
    monkeypatch.setattr(jax, "local_devices", lambda: [_Gpu(capability)])
    with pytest.raises(
        ValueError, match=rf"needs compute capability {needed}, this GPU \(some card\) has {capability}"
    ):
        dispatch("token_scores", backend, {backend: _takes})


@pytest.mark.parametrize("backend", ["cudnn", "mosaic", "triton"])
def test_the_table_of_backends_names_the_operations_that_have_a_kernel(backend):
    names = (
        "causal_attention",
        "column_mass",
        "decode_attention",
        "prefill_attention",
        "select_tokens",
        "token_scores",
    )
    modules = {name: importlib.import_module(f"tca_jax.pallas_kernels.{name}") for name in names}
    having = {name for name, module in modules.items() if backend in module._IMPLEMENTATIONS}
    assert having == {name for name in names if backend_for(name, backend) == backend}
    assert all(backend_for(name, "xla") == "xla" for name in names)
