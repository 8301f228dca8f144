"""Calibration: scores of the candidates, the choice among them, and the profile of budgets that a model keeps."""

from tca_jax.calibration.profile import Profile
from tca_jax.calibration.run import calibrate
from tca_jax.calibration.scores import calibration_scores, choose_candidates

__all__ = ["Profile", "calibrate", "calibration_scores", "choose_candidates"]
