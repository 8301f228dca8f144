"""Attention methods: attention of a prompt's queries, and tokens of the cache. A file each, one registry.

The names stand in `__init__.pyi`; a module is imported when one of its names is first used.
"""

import lazy_loader as _lazy_loader

__getattr__, __dir__, __all__ = _lazy_loader.attach_stub(__name__, __file__)
