"""Profiles: fixed examples by default, many more behind --long."""

import os
import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported: no test reaches for the network

COMMON: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("short", max_examples=30, **COMMON)
settings.register_profile("long", max_examples=300, **COMMON)  # all of them end within two hours on two cores


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="draw many more examples")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("long" if config.getoption("--long") else "short")
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)  # tiny models: a second thread only waits
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background: some tests interrupt what they start
        signal.signal(signal.SIGINT, signal.default_int_handler)

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
