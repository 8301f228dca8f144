"""Shared test setup: run-time shape checks on every signature of the package, fast compilation, and small caches."""

import atexit
import os
import shutil
import signal
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import jaxtyping
import pytest

# A CPU counts as eight devices, for what runs over a mesh of them; all else runs on the first.
# Nearly all of the tests' time on a CPU is XLA compiling programs that run once, so it optimizes little there, and the
# processes of one run share what they have compiled. What the environment says stands: `XLA_FLAGS= pytest` tests what
# XLA's own defaults compile. Before JAX starts, for it reads these once; subprocesses of tests inherit them.
if shutil.which("nvidia-smi") is None:
    _flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    _flags += " --xla_cpu_parallel_codegen_split_count=1"
    if version("jaxlib").startswith("0.10."):  # later ones do not know it, and XLA ends a process over such a flag
        _flags += " --xla_cpu_use_fusion_emitters=false"
    os.environ.setdefault("XLA_FLAGS", _flags)
    # Programs do not say which lines of Python made their operations: that takes a few percent of the tests' time.
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
    # Without these lines nothing need be stripped from a program before it is looked up in the cache.
    os.environ.setdefault("JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY", "true")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # in xdist's workers it is: that of the process that started them
    _cache = tempfile.mkdtemp(prefix="tca_jax-tests-")
    atexit.register(shutil.rmtree, _cache, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache
# Programs that take less are compiled in about the time in which they are read.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

# A job in the background of a shell is deaf to Ctrl-C, and so is all that it starts: tests that press it would wait.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Must run before anything imports the package: every jaxtyping annotation is then checked by beartype.
_hook = jaxtyping.install_import_hook("tca_jax", "typecheck.check")
_hook.__enter__()

import jax  # noqa: E402

from tca_jax.loading import load  # noqa: E402
from tca_jax.methods import worth  # noqa: E402
from tca_jax.pallas_kernels import kv  # noqa: E402

_empty, _flip = kv.empty, lambda x: (~x.view(f"uint{8 * x.dtype.itemsize}")).view(x.dtype)
kv.empty = lambda *args: jax.tree.map(_flip, _empty(*args))  # NaN for zeros: memory as a GPU may give it
worth.IN_FULL = worth.WINDOW + worth.BLOCK - 1  # prompts of tests are short; these alone have no ranked block

#: Files that take a minute or more. They start first: a long file that starts last leaves the other processes idle.
FIRST = (
    "test_docs.py",
    "lab/test_demo.py",
    "serve/test_engine.py",
    "serve/test_server.py",
    "engine/test_mesh.py",
    "engine/test_contexts.py",
    "engine/test_eight_bits.py",
    "lab/benchmarks/test_commands.py",
)
#: Files and folders of tests/ that run whole commands, examples, trained models, several processes or meshes, or all
#: methods in turn. `make test-integration` runs them and the tests of other files that are marked `integration`.
INTEGRATION = (
    "engine/test_mesh.py",
    "engine/test_scored.py",
    "lab/benchmarks",
    "lab/evaluation/test_answering.py",
    "lab/harness",
    "lab/test_cli_eval.py",
    "lab/test_demo.py",
    "lab/test_equal_bytes.py",
    "methods/test_all_methods.py",
    "pallas_kernels/test_transforms.py",
    "reliability",
    "serve/test_constraints.py",
    "serve/test_engine.py",
    "serve/test_failures.py",
    "serve/test_ray.py",
    "serve/test_server.py",
    "test_cli.py",
    "test_cli_chat.py",
    "test_cli_script.py",
    "test_examples.py",
    "test_recall_model.py",
    "test_train_recall_model.py",
)
#: Files in which every test is slow. `make test-slow` runs them and the tests of other files that are marked `slow`;
#: `pytest --collect-only -q -m slow` lists them.
SLOW = ("distributed",)
_TESTS = Path(__file__).parent
_MOST_MAPS = 25_000  # of 65,530; the largest module's programs come on top
#: Files that an expression of `-m` deselects as a whole.
_IGNORED = {"not integration and not slow": (*INTEGRATION, *SLOW), "integration": SLOW}


def pytest_ignore_collect(collection_path, config):
    """Does not import files whose tests are all deselected: importing takes seconds per process."""
    ignored = _IGNORED.get(config.option.markexpr, ())
    if _TESTS in collection_path.parents and _place(collection_path, ignored) < len(ignored):
        return True
    return None


def pytest_collection_modifyitems(items):
    for item in items:
        skips = {mark.kwargs["reason"] for mark in item.iter_markers("skipif")}
        if _place(item.path, SLOW) < len(SLOW):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow"):  # some cases of an integration test are slow
            item.own_markers = [mark for mark in item.own_markers if mark.name != "integration"]
        elif _place(item.path, INTEGRATION) < len(INTEGRATION) or "needs 8 devices" in skips:
            item.add_marker(pytest.mark.integration)
    places = {path: _place(path, (*FIRST, *INTEGRATION)) for path in {item.path for item in items}}
    items.sort(key=lambda item: places[item.path])


def _place(path, names):
    """Index of a file, or of its folder, in `names`; the number of names if it is in none of them."""
    path = path.relative_to(_TESTS)
    own = {path.as_posix(), *(folder.as_posix() for folder in path.parents)}
    return next((place for place, name in enumerate(names) if name in own), len(names))


@pytest.fixture(autouse=True, scope="module")
def no_programs_of_other_modules():
    """A process may map so many pieces of memory (65,530 on Linux): the programs of thousands of tests are too many."""
    yield
    if "jax" not in sys.modules:
        return
    import jax

    from tca_jax.programs import forget_programs

    maps = Path("/proc/self/maps")  # of Linux alone
    if maps.exists() and maps.read_bytes().count(b"\n") < _MOST_MAPS:
        return
    forget_programs()
    jax.clear_caches()


@pytest.fixture
def no_type_checks():
    """The library as users run it: on wrong input the type checks of the tests would come first."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture(scope="module")
def lm():
    """The tiny model under full attention, without a tokenizer."""
    from tiny import tiny_lm

    return tiny_lm()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder with the tiny model and its tokenizer."""
    from tiny import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def written(checkpoint):
    """The tiny model with its tokenizer."""
    return load(checkpoint)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a model, a text and a profile."""
    from tiny import TCA, write_checkpoint

    from tca_jax.calibration.profile import Profile

    folder = tmp_path_factory.mktemp("work")
    write_checkpoint(folder / "model")
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 6)
    Profile.uniform(TCA, 2, 2, 3).save(folder / "profile")
    return folder


@pytest.fixture
def in_work(work, monkeypatch):
    """The working folder is `work`, of which a module may have its own."""
    monkeypatch.chdir(work)
