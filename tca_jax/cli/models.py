"""The model that a command runs; invalid options raise before weights are read."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tca_jax.cli.errors import naming_options
from tca_jax.cli.options import ModelOptions
from tca_jax.errors import UserError, explaining, require
from tca_jax.progress import progress

if TYPE_CHECKING:
    from tca_jax.calibration.profile import Profile
    from tca_jax.calibration.worth_profile import WorthProfile
    from tca_jax.engine.contexts import Context
    from tca_jax.engine.lm import LM
    from tca_jax.loading import Checkpoint
    from tca_jax.methods.written import Parts

SYSTEM_BEHIND_CONTEXT = "--system stands before the document: give it where that is read, not with --context"

#: Where options come from that cannot be written on a command line.
_SOURCES = {
    "candidates": "--profile, from tca-jax calibrate --paper",
    "gates": "--profile, from tca-jax calibrate, or gates=FILE.tsv",
    "preferences": "preferences, which are measured in Python: tca_jax.lab.rivals.cake.layer_preferences",
    "head_scores": "head_scores, which are measured in Python: tca_jax.lab.rivals.kvzip_heads.repetition_scores",
}


@contextlib.contextmanager
def opened(name: str, options: ModelOptions, *, rows: int = 1) -> Iterator[tuple[Checkpoint, Callable[[], LM]]]:
    """The checkpoint of a model, and a function that reads its weights, for `rows` prompts at once."""
    from tca_jax.engine.placement import parse_mesh
    from tca_jax.loading import check_options, open_checkpoint
    from tca_jax.methods.written import parse_parts
    from tca_jax.models.sharding import DATA, axis_size
    from tca_jax.pallas_kernels.backends import check_backend

    stored: dict[str, Any] = {name: getattr(options, name) for name in ("dtype", "weights", "kv", "attention")}
    with naming_options(*stored, "backend", "kept"):
        check_options(**stored, profile=options.profile, kept=options.kept)
        check_backend(options.backend)
    parts = None if options.method is None else parse_parts(options.method, "--method")
    mesh = None if options.mesh is None else parse_mesh(options.mesh, "--mesh")
    devices = axis_size(mesh, DATA)
    divide = f"{devices} must divide the number of prompts, which is {rows}"
    require(rows % devices == 0, f"--mesh {options.mesh}: {divide}")
    with progress() as report:
        report(f"loading {name}", None, None)
        checkpoint = open_checkpoint(name)

        def load() -> LM:
            with naming_options("kept"):
                profile = checkpoint.read_profile(options.profile, options.kept)
            method = None if parts is None else _method(parts, profile, f"--method {options.method}", checkpoint)
            lm = checkpoint.load(profile, mesh=mesh, progress=functools.partial(report, f"loading {name}"), **stored)
            return lm if method is None else lm.with_method(method)

        yield checkpoint, load


def read_context(folder: Path) -> Context:
    """A context that was saved; a terminal shows that it loads."""
    from tca_jax.engine.contexts import Context

    with progress() as report:
        report(f"loading {folder}", None, None)
        return Context.load(folder)


def _method(parts: Parts, profile: Profile | WorthProfile | None, where: str, checkpoint: Checkpoint) -> Any:
    """The named method, with a profile's values of its options; errors begin with `where`."""
    from tca_jax.calibration.profile import options_of
    from tca_jax.methods import get
    from tca_jax.methods.registry import option_names, required_options, with_known
    from tca_jax.methods.written import joined

    known, taken = {} if profile is None else options_of(profile), {x for part, _ in parts for x in option_names(part)}
    useless = f"{where} takes nothing of a {type(profile).__name__}: leave out --profile"
    require(profile is None or set(known) & taken, useless)
    name, given = joined(parts, where)
    options = with_known(name, known, given)
    for part, _ in parts:
        for missing in set(required_options(part)) - set(options if len(parts) == 1 else options[part]):
            raise UserError(f"{where}: {part} needs {_SOURCES.get(missing, 'its option ' + missing)}")
    with explaining(where, UserError):
        method = get(name, **options)
        method.validate_for(checkpoint.config.num_layers, checkpoint.config.num_kv_heads)
    return method
