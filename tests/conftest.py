"""Profiles: fixed examples by default, many more behind --long. And what many tests begin with."""

import os
import shutil
import signal
from pathlib import Path
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
settings.register_profile("short", max_examples=20, **COMMON)
settings.register_profile("long", max_examples=300, **COMMON)  # all of them end within two hours on two cores


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="draw many more examples")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("long" if config.getoption("--long") else "short")
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)  # tiny models: a second thread only waits
    # A shell's background ignores SIGINT, and nohup SIGHUP. Processes that tests start would inherit that, and some tests
    # interrupt them. A handler is not inherited; that of SIGHUP does nothing, so that the tests go on as nohup wants.
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, lambda *_: None)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


@pytest.fixture
def here(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the directory that the module prepares once, to work in."""
    folder = tmp_path / "here"
    shutil.copytree(prepared, folder)
    monkeypatch.chdir(folder)
    return folder
