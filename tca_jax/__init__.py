"""tca_jax: training-free context-adaptive attention (TCA, arXiv 2512.09238) for long-context LLM inference in JAX."""

from importlib.metadata import version as _version
from typing import TYPE_CHECKING

from tca_jax import calibrate as calibrate
from tca_jax import diagnostics
from tca_jax.calibrate import Profile, calibration_scores, candidate_budgets
from tca_jax.config import TCAConfig
from tca_jax.decoding import generate_tokens
from tca_jax.functional import attend, select
from tca_jax.generation import Output, Stats, generate, stream
from tca_jax.inspection import kept_tokens
from tca_jax.lm import LM
from tca_jax.loading import load
from tca_jax.sampling import Sampling

if TYPE_CHECKING:  # at run time the name is the package itself, which can be called
    from tca_jax.calibrate.run import calibrate as calibrate  # type: ignore[no-redef]

__version__ = _version("tca-jax")

__all__ = [
    "LM",
    "Output",
    "Profile",
    "Sampling",
    "Stats",
    "TCAConfig",
    "attend",
    "calibrate",
    "calibration_scores",
    "candidate_budgets",
    "diagnostics",
    "generate",
    "generate_tokens",
    "kept_tokens",
    "load",
    "select",
    "stream",
]
