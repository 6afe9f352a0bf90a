"""Files of goldens, one for each kind of machine that made some: another one may round
differently.
"""

import json
import platform
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from goldens.commands import COMMANDS
from goldens.engines import ENGINES
from goldens.trajectory import Trajectory

FOLDER = Path(__file__).with_name("machines")
CASES: Mapping[str, Callable[..., Trajectory]] = {
    **{f"command: {name}": case for name, case in COMMANDS.items()},
    **{f"engine: {name}": case for name, case in ENGINES.items()},
}


def this_machine() -> dict[str, str]:
    """What decides how forwards round, and the versions of the libraries that make the models."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": _processor(),
    }


def difference(stored: Mapping[str, str]) -> str | None:
    """Why results need not have the stored bits here; None: they must."""
    here = this_machine()
    others = [
        f"{name} {here[name]}, not {stored.get(name)}"
        for name in here
        if here[name] != stored.get(name)
    ]
    return (
        f"goldens were made on another machine: this one has {'; '.join(others)}"
        if others
        else None
    )


def load() -> dict[str, Any]:
    """The machine and the goldens of the file of this machine, else of the first one; empty ones if
    there is none.
    """
    files = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
    here = [file for file in files if difference(file["machine"]) is None]
    chosen: dict[str, Any] = (here or files or [{"machine": {}, "goldens": {}}])[0]
    return chosen


def make(name: str) -> Trajectory:
    """Run a case."""
    with tempfile.TemporaryDirectory() as folder:
        return CASES[name](folder=Path(folder))


def store(goldens: Mapping[str, Trajectory]) -> None:
    """Replace the goldens of this machine's processor."""
    FOLDER.mkdir(exist_ok=True)
    file = FOLDER / f"{'-'.join(_processor().lower().split()[:3])}.json"
    file.write_text(
        json.dumps({"machine": this_machine(), "goldens": dict(sorted(goldens.items()))}, indent=1)
        + "\n"
    )


def _processor() -> str:
    """Vendor, family and model, by which libraries choose their kernels."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    keys = ("vendor_id", "cpu family", "model", "model name")
    return " ".join(fields[key] for key in keys if key in fields) or platform.machine()
