"""Calibration: candidate budgets, their scores, and the profile of budgets that a model keeps.

`tca_jax.calibrate(lm, texts)` runs it: the module itself can be called, so that the package of this name and the
function of this name do not hide each other.
"""

import functools
import sys
import types
from typing import Any

from tca_jax.calibrate.candidates import candidate_budgets
from tca_jax.calibrate.profile import Profile
from tca_jax.calibrate.run import calibrate
from tca_jax.calibrate.scores import calibration_scores, choose_candidates

__all__ = ["Profile", "calibrate", "calibration_scores", "candidate_budgets", "choose_candidates"]


class _CallableModule(types.ModuleType):
    @functools.wraps(calibrate)
    def __call__(self, *args: Any, **kwargs: Any) -> Profile:
        return calibrate(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
