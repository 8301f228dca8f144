"""tca_jax: training-free context-adaptive attention (TCA, arXiv 2512.09238) for long-context LLM inference in JAX.

Importing it loads nothing else, JAX included: a name or a submodule is imported when it is first used.
"""

from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names for type checkers, which do not follow `__getattr__`
    from tca_jax import diagnostics as diagnostics
    from tca_jax import methods as methods
    from tca_jax.calibration.profile import Profile as Profile
    from tca_jax.calibration.run import calibrate as calibrate
    from tca_jax.calibration.scores import calibration_scores as calibration_scores
    from tca_jax.engine.contexts import Context as Context
    from tca_jax.engine.contexts import prefill as prefill
    from tca_jax.engine.generation import Output as Output
    from tca_jax.engine.generation import Stats as Stats
    from tca_jax.engine.generation import generate as generate
    from tca_jax.engine.generation import stream as stream
    from tca_jax.engine.lm import LM as LM
    from tca_jax.engine.sampling import Sampling as Sampling
    from tca_jax.engine.scoring import Scores as Scores
    from tca_jax.engine.scoring import score as score
    from tca_jax.engine.token_generation import generate_tokens as generate_tokens
    from tca_jax.errors import UserError as UserError
    from tca_jax.functional import attend as attend
    from tca_jax.functional import select as select
    from tca_jax.inspection import kept_tokens as kept_tokens
    from tca_jax.loading import load as load
    from tca_jax.methods.candidates import candidate_budgets as candidate_budgets
    from tca_jax.methods.config import TCAConfig as TCAConfig

#: Public name -> the module that defines it; None where the name is a submodule itself.
_MODULES: dict[str, str | None] = {
    "Context": "tca_jax.engine.contexts",
    "LM": "tca_jax.engine.lm",
    "Output": "tca_jax.engine.generation",
    "Profile": "tca_jax.calibration.profile",
    "Sampling": "tca_jax.engine.sampling",
    "Scores": "tca_jax.engine.scoring",
    "Stats": "tca_jax.engine.generation",
    "TCAConfig": "tca_jax.methods.config",
    "UserError": "tca_jax.errors",
    "attend": "tca_jax.functional",
    "calibrate": "tca_jax.calibration.run",
    "calibration_scores": "tca_jax.calibration.scores",
    "candidate_budgets": "tca_jax.methods.candidates",
    "diagnostics": None,
    "generate": "tca_jax.engine.generation",
    "generate_tokens": "tca_jax.engine.token_generation",
    "kept_tokens": "tca_jax.inspection",
    "load": "tca_jax.loading",
    "methods": None,
    "prefill": "tca_jax.engine.contexts",
    "score": "tca_jax.engine.scoring",
    "select": "tca_jax.functional",
    "stream": "tca_jax.engine.generation",
}

__version__: str  # read from the package's metadata when it is asked for
__all__ = list(_MODULES)


if not TYPE_CHECKING:  # to which a module that answers to every name has no misspelled ones

    def __getattr__(name: str) -> Any:
        """A public name or submodule at its first use (PEP 562); from then on it is an ordinary attribute."""
        value: Any
        if module := _MODULES.get(name):
            value = getattr(_import_module(module), name)
        elif name == "__version__":
            from importlib.metadata import version

            value = version("tca-jax")
        elif not name.startswith("_") and _find_spec(f"{__name__}.{name}"):
            value = _import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, "__version__"})
