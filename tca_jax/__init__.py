"""tca_jax: training-free context-adaptive attention (TCA, arXiv 2512.09238) for long-context LLM inference in JAX."""

from importlib.metadata import version as _version

from tca_jax import diagnostics
from tca_jax.calibration import Profile, calibrate, calibration_scores
from tca_jax.engine.decoding import generate_tokens
from tca_jax.engine.generation import Output, Stats, generate, stream
from tca_jax.engine.lm import LM
from tca_jax.engine.sampling import Sampling
from tca_jax.engine.scoring import Scores, score
from tca_jax.functional import attend, select
from tca_jax.inspection import kept_tokens
from tca_jax.loading import load
from tca_jax.methods.candidates import candidate_budgets
from tca_jax.methods.config import TCAConfig

__version__ = _version("tca-jax")

__all__ = [
    "LM",
    "Output",
    "Profile",
    "Sampling",
    "Scores",
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
    "score",
    "select",
    "stream",
]
