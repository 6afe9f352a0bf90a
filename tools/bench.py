"""Run a benchmark: both sides in one process, in turn, with medians and ranges.

    python tools/bench.py                       lists the benchmarks
    python tools/bench.py compare opt-125m --tokens 256
    python tools/bench.py compare --help

Prints a table and JSON, or writes the JSON to ``--output``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

import torch
from measuring import machine, table

FOLDERS = ("benches", "paper")


def benchmarks() -> dict[str, str]:
    """The module of each benchmark, by the benchmark's name."""
    root = Path(__file__).parent
    modules = [path for folder in FOLDERS for path in sorted((root / folder).glob("*.py"))]
    return {path.stem.replace("_", "-"): f"{path.parent.name}.{path.stem}" for path in modules if is_benchmark(path)}


def is_benchmark(path: Path) -> bool:
    """Whether a module is a benchmark, and not what several of them share."""
    return "\ndef add_options(" in path.read_text(encoding="utf-8")


def main() -> None:
    known = benchmarks()
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in known:
        print(__doc__, "\n".join(known), sep="\n", file=sys.stdout if name in ("-h", "--help") else sys.stderr)
        sys.exit(0 if name in ("-h", "--help") else 2)
    module = importlib.import_module(known[name])
    parser = argparse.ArgumentParser(description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=[name])
    parser.add_argument("--threads", type=int, help="number of torch threads; by default all cores")
    parser.add_argument("--output", type=Path, help="file for the JSON")
    module.add_options(parser)
    # What is no option of the benchmark, such as "--whole", is a value: the quoted options of a side or a run.
    options_of_it = parser._option_string_actions
    words = (
        f" {word}" if word.startswith("--") and word.partition("=")[0] not in options_of_it else word
        for word in sys.argv[1:]
    )
    options = parser.parse_args(list(words))
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    measured = module.run(options)
    if measured is None:
        return
    print("\n".join(table(measured)))
    text = json.dumps({"machine": machine(), "options": vars(options), **measured}, default=str)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
