"""Calibration: probes, the two searches of what heads are worth, the paper's scores, and the profile of a model."""

from tca_jax.calibration.profile import Profile, head_gates
from tca_jax.calibration.run import calibrate
from tca_jax.calibration.scores import calibration_scores, choose_candidates
from tca_jax.measured_options import layer_preferences, published_temperatures, repetition_scores, search_patterns

__all__ = [
    "Profile",
    "calibrate",
    "calibration_scores",
    "choose_candidates",
    "head_gates",
    "layer_preferences",
    "published_temperatures",
    "repetition_scores",
    "search_patterns",
]
