"""Run a benchmark: both sides in one process, in turn, with medians and ranges.

    python tools/bench.py                       lists the benchmarks
    python tools/bench.py compare opt-125m --tokens 256
    python tools/bench.py compare --help

Prints a table and JSON, or writes the JSON to ``--output``. A benchmark is a function whose
arguments are its command line.
"""

import importlib
import inspect
import json
import sys
from pathlib import Path

import torch
from measuring import command_line, machine, table

BENCHMARKS = {  # the module of each, in which it has its name
    "accumulation": "benches.weights",
    "accuracy": "paper.accuracy",
    "amp": "paper.zo2",
    "compare": "benches.compare",
    "edge": "benches.edge",
    "kernels": "benches.weights",
    "memory": "paper.zo2",
    "real-task": "benches.real_task",
    "resume": "benches.storage",
    "rewards": "benches.generation",
    "routed": "benches.generation",
    "stream": "benches.storage",
    "stages": "benches.stages",
    "sums": "benches.sums",
    "train": "benches.runs",
    "tuning": "benches.runs",
    "zo2": "paper.zo2",
}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in BENCHMARKS:
        is_help = name in ("-h", "--help")
        print(__doc__, *BENCHMARKS, sep="\n", file=sys.stdout if is_help else sys.stderr)
        sys.exit(0 if is_help else 2)
    benchmark = getattr(importlib.import_module(BENCHMARKS[name]), name.replace("-", "_"))
    parser = command_line(benchmark)
    parser.prog += f" {name}"
    parser.add_argument("--threads", type=int, help="number of torch threads; by default all cores")
    parser.add_argument("--output", type=Path, help="file for the JSON")
    # What is no option of the benchmark, such as "--whole", is a value: the quoted options of a
    # side or a run.
    known = parser._option_string_actions
    words = (
        f" {word}" if word.startswith("--") and word.partition("=")[0] not in known else word
        for word in sys.argv[2:]
    )
    options = vars(parser.parse_args(list(words)))
    if options["threads"] is not None:
        torch.set_num_threads(options["threads"])
    measured = benchmark(
        **{name: options[name] for name in inspect.signature(benchmark).parameters}
    )
    if measured is None:
        return
    print("\n".join(table(measured)))
    text = json.dumps(
        {"machine": machine(), "options": {"benchmark": name, **options}, **measured}, default=str
    )
    if options["output"] is None:
        print(text)
    else:
        options["output"].write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
