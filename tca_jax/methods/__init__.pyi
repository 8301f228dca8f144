"""Public names and the modules that define them, for type checkers and for `__init__.py`, which imports them lazily."""

from .base import Attended as Attended
from .base import CachePolicy as CachePolicy
from .base import Heads as Heads
from .base import Method as Method
from .base import PrefillPolicy as PrefillPolicy
from .block_sparse import BlockSparsePrefill as BlockSparsePrefill
from .full import BASELINE as BASELINE
from .full import FullCache as FullCache
from .full import FullPrefill as FullPrefill
from .regions import Selected as Selected
from .regions import Selection as Selection
from .registry import get as get
from .registry import names as names
from .registry import register as register
from .sparse import SparsePrefill as SparsePrefill
