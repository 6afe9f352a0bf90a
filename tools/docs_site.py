"""A hook of mkdocs: what stands outside docs/ becomes pages, so that no text is kept twice.

README.md and the pages of examples/ are shown as they are, with their links led to the site's
pages; the reference lists what the two packages export, from their docstrings.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
OUTSIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md")
PACKAGES = ("zo2core", "zo2adapters")
MORE = """
| Program | |
|---|---|
| [Examples](examples.md) | What does a program of a page look like? |
| [zo2core](reference-zo2core.md) | What are the arguments of the engine, and of its parts? |
| [zo2adapters](reference-zo2adapters.md) | What are those of models, trainers and tasks? |

| Join | |
|---|---|
| [Contributing](contributing.md) | Which commands are there, and how is a change tried? |
| [Changelog](changelog.md) | What is new? |
| [Security](security.md) | How do I report a vulnerability? |
"""
FIGURES = ROOT / "tools" / "results"


def name_on_site(path: str) -> str:
    """The page of a text outside docs/: examples/README.md is examples.md."""
    folder, _, name = path.rpartition("/")
    return f"{folder}.md" if folder else name.lower()


def exported(package: str) -> dict[str, str]:
    """The module of each name that a package exports."""
    tree = ast.parse((ROOT / "src" / package / "__init__.py").read_text())
    return {
        alias.name: str(node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == alias.asname
    }


def reference(package: str) -> str:
    """The page of a package's names, by module."""
    by_module: dict[str, list[str]] = {}
    for name, module in exported(package).items():
        by_module.setdefault(module, []).append(name)
    parts = [f"# {package}", f"What `from {package} import ...` exports, by module."]
    # modules beside the folders, such as the engine, are what a reader begins with
    for module, names in sorted(by_module.items(), key=lambda item: item[0].count(".")):
        parts += [f"## {module.removeprefix(package + '.')}"]
        parts += [f"::: {module}.{name}" for name in names]
    return "\n\n".join(parts) + "\n"


def example(path: Path) -> str:
    """The page of a program."""
    return f"# {path.stem.replace('_', ' ').capitalize()}\n\n```python\n{path.read_text()}```\n"


def sections(index: str) -> list[dict[str, list[dict[str, str]]]]:
    """The navigation: the tables of docs/index.md."""
    found: list[dict[str, list[dict[str, str]]]] = []
    for line in index.splitlines():
        if title := re.match(r"\| ([A-Z][\w ]+) \| \|$", line):
            found.append({title[1]: []})
        elif found:
            [pages] = found[-1].values()
            pages += [
                {name: page} for name, page in re.findall(r"\[([^]]+)\]\(([\w-]+\.md)\)", line)
            ]
    return found


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation."""
    index = (ROOT / "docs" / "index.md").read_text()
    config.nav = [{"Documentation": "index.md"}, {"First steps": "readme.md"}]
    config.nav += sections(index + MORE)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    pages = {name_on_site(path): (ROOT / path).read_text() for path in OUTSIDE}
    pages |= {f"reference-{package}.md": reference(package) for package in PACKAGES}
    pages |= {f"example-{path.stem}.md": example(path) for path in ROOT.glob("examples/*.py")}
    pages["LICENSE.md"] = f"# Licence\n\n```text\n{(ROOT / 'LICENSE').read_text()}```\n"
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    for figure in FIGURES.glob("*.png"):
        files.append(File.generated(config, f"results/{figure.name}", abs_src_path=str(figure)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links out of docs/, and of the pages outside, to the site's pages."""
    here = page.file.src_uri
    if here == "index.md":
        markdown += MORE

    def led(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        target = target.removeprefix("../").removeprefix("docs/").removeprefix("tools/")
        if target.endswith(".py"):
            target = f"example-{Path(target).stem}.md"
        elif target in OUTSIDE and (here != "examples.md" or target == "README.md"):
            target = name_on_site(target)
        elif target == "examples":
            target = "examples.md"
        elif target == "LICENSE":
            target = "LICENSE.md"
        return f"]({target}{anchor})"

    return re.sub(r"\]\((?!https?:)([^)#]+)(#[^)]*)?\)", led, markdown)
