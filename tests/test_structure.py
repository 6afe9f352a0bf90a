"""The house: every module has a room, imports run one way, siblings do not know each other."""

import ast
import importlib
import io
import math
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
from profiles import each_choice

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"

MODULES = sorted(SOURCE.rglob("*.py"))

# Rooms, and modules of the root, from the ground up. One level may import all levels below it, and
# nothing beside it.
LEVELS: dict[str, tuple[set[str], ...]] = {
    "zo2core": (
        {"errors", "io", "exports", "encodings"},
        {"types", "ranges"},
        {"protocols", "profiling", "journal", "checkpoint", "kernels"},
        {
            "sources",
            "devices",
            "schedulers",
            "noise",
            "estimators",
            "optimizers",
            "perturbation",
            "workers",
        },
        {"sweep", "planning"},
        {"shared"},
        {"runner"},
        {"methods"},
        {"build"},
        {"engine"},
    ),
    "zo2adapters": (
        {"optional_package", "limited_process"},
        {"models"},
        {"edge"},
        {"tasks"},
        {"frameworks"},
        {"trainers"},
        {"commands"},
        {"cli"},
        {"__main__"},
    ),
}
LEVEL_OF = {
    (package, room): at
    for package, levels in LEVELS.items()
    for at, rooms in enumerate(levels)
    for room in rooms
}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.add(str(node.module))
    return found


def room_of(path: Path) -> tuple[str, str]:
    package, room, *_ = path.relative_to(SOURCE).parts
    return package, room.removesuffix(".py")


def test_every_room_has_its_level() -> None:
    assert {room_of(path) for path in MODULES} - {
        (package, "__init__") for package in LEVELS
    } == set(LEVEL_OF)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_modules_import_downwards_only(path: Path) -> None:
    package, room = room_of(path)
    optional = {"triton"} if path.name == "triton_kernels.py" else set()
    for module in imports(path):
        top, *rest = module.split(".")
        libraries = {
            "torch",
            "psutil",
            "filelock",
            "safetensors",
            "xxhash",
            *optional,
            *sys.stdlib_module_names,
        }
        assert package != "zo2core" or top == "zo2core" or top in libraries, module
        if top == package and room != "__init__" and rest[0] != room:
            assert LEVEL_OF[top, rest[0]] < LEVEL_OF[package, room], f"{room} imports {module}"


@pytest.mark.parametrize("path", sorted(ROOT.joinpath("tests").rglob("*.py")), ids=lambda p: p.name)
def test_no_test_imports_another_one(path: Path) -> None:
    assert not [module for module in imports(path) if module.startswith(("test_", "tests"))], (
        "helpers are in support/"
    )


def test_examples_need_no_name_that_is_not_exported() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    examples = [
        code
        for page in pages
        for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    ]
    names = {
        (node.module, alias.name)
        for code in examples
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("zo2")
        for alias in node.names
    }
    assert names
    for module, name in names:
        assert module in {"zo2core", "zo2core.errors", "zo2adapters"}, f"{name} of {module}"
        assert hasattr(importlib.import_module(module), name)


def test_the_core_runs_without_transformers() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None; sys.modules['zo2adapters'] = None; "
        "import zo2core"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_touches_no_device_and_starts_no_thread() -> None:
    code = (
        "import threading, torch, zo2core; assert not torch.cuda.is_initialized(); assert "
        "threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("package", ["zo2core", "zo2adapters"])
def test_a_star_import_brings_what_the_package_exports_and_no_modules(package: str) -> None:
    brought: dict[str, object] = {}
    exec(f"from {package} import *", brought)
    del brought["__builtins__"]
    source = ast.parse((ROOT / "src" / package / "__init__.py").read_text())
    aliases = {
        name.asname
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    exported = {alias for alias in aliases if alias is not None and not alias.startswith("_")}
    left_out = exported - brought.keys()
    assert all(name.endswith("LightningModule") for name in left_out), "only these need an extra"
    assert brought.keys() <= exported
    assert 20 < len(brought) <= 60, "a public name more is one that everybody has to know"


@pytest.mark.parametrize(
    "axes",
    [([1, 2, 3], ["a", "b"], [True, False]), ([1], [2, 3, 4, 5], [6, 7, 8]), ([1, 2], [3, 4])],
)
def test_the_default_profile_has_every_value_of_each_parameter(
    axes: tuple[list[object], ...],
) -> None:
    cases = each_choice(*axes)
    assert len({case.values for case in cases}) == len(cases) == math.prod(map(len, axes))
    short = [case.values for case in cases if not case.marks]
    assert len(short) == max(map(len, axes))
    assert [set(values) for values in zip(*short, strict=True)] == [set(axis) for axis in axes]


# Most lines of code of each room, without blanks, comments and docstrings. A room that becomes
# smaller takes its number down; one that has to grow takes it up, with the reason in the commit.
MOST_LINES = {
    "zo2adapters": 455,
    "zo2adapters/commands": 2703,
    "zo2adapters/edge": 421,
    "zo2adapters/frameworks": 924,
    "zo2adapters/models": 4194,
    "zo2adapters/tasks": 2533,
    "zo2adapters/trainers": 4017,
    "zo2core": 4888,
    "zo2core/checkpoint": 726,
    "zo2core/io": 386,
    "zo2core/kernels": 1058,
    "zo2core/methods": 703,
    "zo2core/planning": 546,
    "zo2core/sources": 872,
    "zo2core/sweep": 1782,
}


def code_lines(path: Path) -> int:
    text = path.read_text()
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                documented.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    layout = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in layout
    ]
    return len(
        {line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - documented
    )


def test_no_room_grows() -> None:
    lines: dict[str, int] = {}
    for path in MODULES:
        package, *parts = path.relative_to(SOURCE).parts
        room = f"{package}/{parts[0]}" if len(parts) > 1 else package
        lines[room] = lines.get(room, 0) + code_lines(path)
    assert lines.keys() == MOST_LINES.keys()
    assert not {room: count for room, count in lines.items() if count > MOST_LINES[room]}, (
        "see the table"
    )
    assert not {room: count for room, count in lines.items() if count < MOST_LINES[room] - 20}, (
        "take its number down"
    )
