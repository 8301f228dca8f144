"""Calibration: what heads are worth, probes, the paper's scores, and the profile that a model keeps."""

from tca_jax.calibration.patterns import search_patterns
from tca_jax.calibration.preferences import head_gates, layer_preferences
from tca_jax.calibration.profile import Profile
from tca_jax.calibration.rows import choose_candidates
from tca_jax.calibration.run import calibrate
from tca_jax.calibration.scores import calibration_scores

__all__ = [
    "Profile",
    "calibrate",
    "calibration_scores",
    "choose_candidates",
    "head_gates",
    "layer_preferences",
    "search_patterns",
]
