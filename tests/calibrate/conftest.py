"""What tests of calibration share."""

import jax
import pytest


@pytest.fixture
def compiled():
    """Names of the programs that are compiled from now on."""
    names = []

    def listen(event: str, duration: float, **kwargs) -> None:
        if event.endswith("backend_compile_duration"):
            names.append(str(kwargs.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)
