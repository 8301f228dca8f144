"""Public names and the modules that define them, for type checkers and for `__init__.py`, which imports them lazily."""

from . import diagnostics as diagnostics
from . import methods as methods
from .calibration.profile import Profile as Profile
from .calibration.run import calibrate as calibrate
from .calibration.scores import calibration_scores as calibration_scores
from .calibration.worth_profile import WorthProfile as WorthProfile
from .engine.contexts import Context as Context
from .engine.contexts import prefill as prefill
from .engine.generation import Output as Output
from .engine.generation import Stats as Stats
from .engine.generation import generate as generate
from .engine.generation import stream as stream
from .engine.generation_config import GenerationConfig as GenerationConfig
from .engine.lm import LM as LM
from .engine.sampling import Sampling as Sampling
from .engine.score import Scores as Scores
from .engine.score import score as score
from .engine.traced import generate_tokens as generate_tokens
from .errors import UserError as UserError
from .functional import attend as attend
from .functional import select as select
from .loading import load as load
from .methods.candidates import candidate_budgets as candidate_budgets
from .methods.config import TCAConfig as TCAConfig

__version__: str
