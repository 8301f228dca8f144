"""Calibration: predicted worth, the paper's scores, and the profile of a model."""

from tca_jax.calibration.profile import Profile
from tca_jax.calibration.run import calibrate
from tca_jax.calibration.scores import calibration_scores, choose_candidates
from tca_jax.calibration.worth_profile import WorthProfile

__all__ = ["Profile", "WorthProfile", "calibrate", "calibration_scores", "choose_candidates"]
