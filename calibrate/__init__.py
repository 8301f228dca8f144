"""Calibration: probes, the two searches of what heads are worth, the paper's scores, and the profile of a model."""

from tca_jax.calibration.profile import Profile, head_gates
from tca_jax.calibration.run import calibrate
from tca_jax.calibration.scores import calibration_scores, choose_candidates

__all__ = [
    "Profile",
    "calibrate",
    "calibration_scores",
    "choose_candidates",
    "head_gates",
]
