"""The house: imports run one way, modules stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
MODULES = sorted(SOURCE.rglob("*.py"))

GROUND = {"types", "errors", "records", "memory", "timeline", "trace", "account"}
FLOOR = {"protocols", "checkpoint", "journal", "kernels"}
PARTS = {"sources", "devices", "schedulers", "noise", "estimators"}
VISIT = {"activations", "walk", "workspace", "mover", "visit", "budget", "pieces", "evaluation"}  # the engine's inside
CHOICES = {"probes", "arrangement", "residency", "numbers"}  # which parts it takes


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.add(str(node.module))
    return found


def part(module: str) -> str:
    """The part of zo2core a module belongs to: 'sources' for 'zo2core.sources.pinned'."""
    return module.split(".")[1] if "." in module else ""


def allowed(of: str) -> set[str]:
    if of in GROUND:
        return {"types": {"errors", "timeline"}, "trace": {"errors", "timeline"}, "account": {"errors"}}.get(of, set())
    if of in FLOOR:
        return GROUND | {of}
    if of in PARTS:
        return GROUND | FLOOR | {of}
    if of in VISIT:
        return GROUND | FLOOR | VISIT
    if of in {"probes", "numbers"}:
        return GROUND | FLOOR | PARTS
    if of in {"arrangement", "residency"}:
        return GROUND | FLOOR | PARTS | VISIT | CHOICES
    return GROUND | FLOOR | PARTS | VISIT | CHOICES | {"engine"}  # the engine and the package's face


@pytest.mark.parametrize("path", [m for m in MODULES if "zo2core" in m.parts], ids=lambda p: str(p.relative_to(SOURCE)))
def test_core_modules_import_downwards_only(path: Path) -> None:
    of = path.relative_to(SOURCE / "zo2core").parts[0].removesuffix(".py")
    for module in imports(path):
        top = module.split(".")[0]
        optional = {"triton"} if path.name == "triton_kernels.py" else set()
        assert top in {"zo2core", "torch", "psutil", *optional, *sys.stdlib_module_names}, module
        if top == "zo2core":
            assert part(module) in allowed(of), f"{of} imports {module}"


def test_the_core_runs_without_transformers() -> None:
    code = "import sys; sys.modules['transformers'] = None; sys.modules['zo2adapters'] = None; import zo2core"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_touches_no_device_and_starts_no_thread() -> None:
    code = "import threading, torch, zo2core; assert not torch.cuda.is_initialized(); assert threading.active_count() == 1"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_modules_are_small(path: Path) -> None:
    limits = {"hf.py": 300, "opt.py": 60, "llama.py": 60, "qwen.py": 60}
    assert len(path.read_text().splitlines()) <= limits.get(path.name, 400)
