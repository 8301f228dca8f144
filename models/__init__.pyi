"""Public names and the modules that define them, for type checkers and for `__init__.py`, which imports them lazily."""

from .aliases import ALIASES as ALIASES
from .config import ModelConfig as ModelConfig
from .config import read_config as read_config
from .decoder import Decoder as Decoder
from .fingerprint import fingerprint as fingerprint
from .params import LoadedCheckpoint as LoadedCheckpoint
from .params import load_checkpoint as load_checkpoint
from .params import save_decoder as save_decoder
from .params import write_config as write_config
from .rope import RopeConfig as RopeConfig
