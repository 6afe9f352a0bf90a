"""Profiles: fixed examples by default, many more behind --long. And what many tests begin with."""

import atexit
import gc
import os
import shutil
import signal
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from command_lines import Apart, Forker
    from crews import Crew

# before huggingface_hub is imported: no test reaches for the network
os.environ["HF_HUB_OFFLINE"] = "1"
# before torch is imported: tests share the cores, which threads that wait busily would take
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

COMMON: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("short", max_examples=10, **COMMON)
settings.register_profile("long", max_examples=100, **COMMON)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long", action="store_true", help="run all cases, and draw many more examples"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long_profile: a case that only the long profile runs")
    config.addinivalue_line(
        "markers", "few(count): so many cases of these parameters run in the default profile"
    )
    settings.load_profile("long" if config.getoption("--long") else "short")
    if config.getoption("numprocesses", None):
        return  # the processes that run the tests import the rest
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)  # tiny models: a second thread only waits
    # A shell's background ignores SIGINT, and nohup SIGHUP. Processes that tests start would
    # inherit that, and some tests interrupt them. A handler is not inherited; that of SIGHUP does
    # nothing, so that the tests go on as nohup wants.
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, lambda *_: None),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The garbage collector leaves out what was imported: to go through it takes half a second,
    time and again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        # or nanobind reports what was never freed; not before pytest has collected what tests left
        atexit.register(gc.unfreeze)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --long, leave out what is slow: marked cases, and all but a few of the marked
    functions' cases.
    """
    if config.getoption("--long"):
        return
    from profiles import covering_cases

    left_out = {item for item in items if item.get_closest_marker("long_profile") is not None}
    functions: dict[tuple[object, str], list[pytest.Function]] = {}
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and item not in left_out
            and item.get_closest_marker("few") is not None
        ):
            functions.setdefault((item.parent, item.originalname), []).append(item)
    for cases in functions.values():
        left_out.update(set(cases) - covering_cases(cases))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def process_memory(monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of this process, which stay the same for every plan of the test: the real number may
    fall in the meantime.
    """
    from zo2core.io.process_memory import memory_in_use

    nbytes = memory_in_use()
    monkeypatch.setattr("zo2core.planning.memory.memory_in_use", lambda: nbytes)
    return nbytes


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a base and rows, which is only read; modules that need more in it have their
    own.
    """
    from command_lines import make_place

    return make_place(tmp_path_factory.mktemp("place"))


@pytest.fixture
def here(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the prepared directory, to work in."""
    folder = tmp_path / "here"
    shutil.copytree(prepared, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _speeds_are_measured_quickly() -> Iterator[None]:
    from command_lines import measure_quickly

    with pytest.MonkeyPatch.context() as patch:
        measure_quickly(patch)
        yield


@pytest.fixture(scope="session")
def forker() -> Iterator["Forker"]:
    """The process that commands in processes of their own are forked from."""
    from command_lines import Forker

    with closing(Forker()) as made:
        yield made


@pytest.fixture(scope="module")
def apart(forker: "Forker", tmp_path_factory: pytest.TempPathFactory) -> "Apart":
    """Runs commands in processes of their own."""
    from command_lines import Apart

    return Apart(forker, tmp_path_factory.mktemp("apart"))


@pytest.fixture(scope="module")
def crew(forker: "Forker", tmp_path_factory: pytest.TempPathFactory) -> "Crew":
    """Two workers of a run."""
    from crews import Crew

    return Crew(forker, tmp_path_factory.mktemp("crew"), 2)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with its tokenizer, which is only read."""
    from models import save_model, save_tokenizer, small_config

    directory = save_model(tmp_path_factory.mktemp("base") / "base", small_config("llama"))
    save_tokenizer(directory)
    return directory


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place of the test's own for what datasets keeps."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def no_power_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk need not be waited for."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda descriptor: None)
