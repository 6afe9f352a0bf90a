"""Goldens that the command line reaches: ``zo2 train``, and what the other commands read from its
run.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from command_lines import done, make_place, write_rows
from models import WORDS, save_model, save_tokenizer, small_config

from goldens.trajectory import Trajectory, exact, exported_digest, journal_of

STEPS = 4
CANDIDATES = [
    {"prompt": f"the {word} is", "candidates": [" yes", " no"], "answer": " no"}
    for word in WORDS[4:8]
]
PREFERENCES = [
    {"prompt": f"the {word}", "chosen": " sat", "rejected": " ran no"} for word in WORDS[4:8]
]


def trained(
    options: str = "",
    *,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    quantized: str | None = None,  # format in which the base is quantised first
    rows: Sequence[object] | None = None,  # to train on; None: prompts with completions
    resumed_after: int | None = None,  # steps after which the run ends and is resumed
    # whether an earlier step is exported, where it can be replayed, and prompts are continued, too
    read: bool = False,
) -> Trajectory:
    """Train, and let the run write its model."""
    make_place(folder)
    base, data, run = folder / "base", folder / "rows.jsonl", folder / "run"
    if dtype is not torch.float32:
        base = save_model(
            folder / "half",
            small_config("llama", vocab_size=len(WORDS), num_hidden_layers=2),
            dtype,
        )
        save_tokenizer(base)
    if quantized is not None:
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        wide = save_model(
            folder / "wide", small_config("llama", vocab_size=len(WORDS), **sizes), torch.bfloat16
        )
        save_tokenizer(wide)
        base = folder / quantized
        done("convert", "--model", wide, "--quantize", quantized, "--output", base)
    if rows is not None:
        write_rows(data, rows)
    asked = [
        "--lr",
        1e-2,
        "--batch-size",
        3,
        "--evaluation",
        data,
        "--evaluate-every",
        2,
        *options.split(),
    ]
    steps = STEPS if resumed_after is None else resumed_after
    done(
        "train",
        "--method",
        "zeroth-order",
        "--model",
        base,
        "--data",
        data,
        "--output",
        run,
        "--steps",
        steps,
        *asked,
    )
    if resumed_after is not None:
        done("train", "--resume", run, "--steps", STEPS)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    made = journal_of(run / "journal.jsonl")
    made["evaluations"] = exact(
        [row["evaluation_loss"] for row in metrics if "evaluation_loss" in row]
    )
    # a run that was lengthened has model-4 beside model
    made["weights"] = exported_digest(max(run.glob("model*")))
    if read:
        if "--method" not in options or "mezo" in options:
            # a first-order run keeps snapshots of few steps, by the clock
            done("export", "--run", run, "--at", 2, "--output", folder / "two")
            made["weights after 2 steps"] = exported_digest(folder / "two")
        prompts = [
            "generate",
            "--run",
            run,
            "--prompt",
            "the cat",
            "the dog ran is",
            "--max-new-tokens",
            6,
        ]
        made["continued"] = done(*prompts).out.splitlines()
        made["sampled"] = done(*prompts, "--temperature", 1.0, "--top-p", 0.9).out.splitlines()
    return made


ADAPTER = "--method adamw --lora-rank 2"
MEZO = "--method mezo --zo-eps 1e-2 --weight-decay 0.1"
MIXED = "--precision mixed --dtype bfloat16"
FULL = "--weight-decay 0.1 --max-grad-norm 0.5"
SCHEDULED = f"{MIXED} --queries 3 --decay linear --warmup-steps 2 --clip-median 1.5"
HALF = torch.bfloat16
COMMANDS: Mapping[str, Callable[..., Trajectory]] = {
    "mezo, exact, float32, read": partial(trained, f"{MEZO} --write-back-every 2", read=True),
    "mezo, exact, float32, resumed": partial(
        trained, f"{MEZO} --write-back-every 2", resumed_after=3
    ),
    "mezo, exact, bfloat16": partial(trained, MEZO, dtype=HALF),
    "mezo, mixed, 3 queries, linear decay, clipped": partial(trained, SCHEDULED, dtype=HALF),
    "mezo, gaussian, micro-batches": partial(trained, "--noise gaussian --micro-batch-size 1"),
    "fzoo": partial(trained, "--estimator fzoo --queries 3"),
    "evolution strategies, ranks": partial(trained, "--estimator es --fitness ranks --queries 4"),
    "low-rank, read": partial(trained, "--rank 2 --period 3 --queries 2", read=True),
    "low-rank, bfloat16, a direction per row": partial(
        trained, "--rank 2 --per-row --zo-eps 1e-2", dtype=HALF
    ),
    "low-rank, nf4, resumed": partial(
        trained, "--rank 2 --period 3", quantized="nf4", resumed_after=2
    ),
    "mezo, adapter on int8": partial(trained, "--lora-rank 2", quantized="int8"),
    "mezo, loss over candidates": partial(trained, rows=CANDIDATES),
    "mezo, dpo": partial(trained, rows=PREFERENCES),
    "adapter adamw, clipped, micro-batches, resumed": partial(
        trained, f"{ADAPTER} {FULL} --micro-batch-size 2", resumed_after=3
    ),
    "adapter adamw, on nf4, read": partial(trained, ADAPTER, quantized="nf4", read=True),
    "adapter sgd with momentum, bfloat16": partial(
        trained, "--method sgd --momentum 0.9 --lora-rank 2", dtype=HALF
    ),
    "full adamw, micro-batches, read": partial(
        trained, f"--method adamw {FULL} --micro-batch-size 2", read=True
    ),
    "full adamw, streamed, resumed": partial(
        trained, f"--method adamw --stream-blocks {FULL}", resumed_after=3
    ),
    "full adamw, one step late, mixed": partial(
        trained, f"--method adamw --delayed-update {MIXED}", dtype=HALF
    ),
    "lomo, bfloat16": partial(
        trained, f"--method lomo {FULL} --max-grad-norm 0.5 --max-grad-value 0.1", dtype=HALF
    ),
    "lora and lomo, bfloat16, streamed, resumed": partial(
        trained,
        "--method lora+lomo --base-lr 1e-2 --lora-rank 2 --stream-blocks --max-grad-norm 0.5",
        dtype=HALF,
        resumed_after=3,
    ),
    "lomo, norms of layers": partial(trained, f"--method lomo {FULL} --max-grad-norm-per layer"),
    "adalomo": partial(trained, f"--method adalomo {FULL}"),
    "badam, resumed": partial(trained, f"--method badam --switch-every 2 {FULL}", resumed_after=3),
    "badam, streamed, bfloat16": partial(
        trained, "--method badam --switch-every 2 --stream-blocks", dtype=HALF
    ),
}
