"""The run-time type checker of the tests: beartype, with int accepted where float is expected (PEP 484)."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
