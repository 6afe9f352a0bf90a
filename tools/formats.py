"""Test which formats of weights are read in which families: LoRA on tiny models, beside peft on the decoded model.

    python tools/formats.py --output formats.json

For each family and format a tiny checkpoint is written, opened with LoRA on its linear layers, and trained for two steps of
SGD. It is also decoded by `export`, loaded by transformers and trained with peft: losses and adapters have to be equal,
bit for bit. Prints a table in Markdown: an equals sign, or the number of the reason below it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from coded_checkpoints import save_four_bits, save_gpt_oss
from families import small_config, small_model, train_lora
from transformers import AutoModelForCausalLM

from zo2adapters import open_checkpoint
from zo2adapters.models.quantizer import METHODS, quantize
from zo2core import Engine, ZO2Error

FORMATS = ["bfloat16", *METHODS, "gptq", "awq", "int4", "nvfp4", "mxfp4"]
DENSE = ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3", "olmo2", "opt"]
MIXTURES = ["qwen3_moe", "mixtral", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "qwen3_next", "minimax", "phimoe"]
MIXTURES += ["gpt_oss", "llama4_text", "granitemoe"]
STEPS = 2


def written(family: str, form: str, folder: Path) -> Path | None:
    """A tiny checkpoint; None if the format is not one of this family."""
    if form in ("gptq", "awq", "int4", "nvfp4"):
        return save_four_bits(form, folder, family)[1]
    if form == "mxfp4":
        return save_gpt_oss(folder)[1] if family == "gpt_oss" else None
    model: Any = small_model(small_config(family))
    model.to(torch.bfloat16).save_pretrained(folder / "plain")
    if form == "bfloat16":
        return folder / "plain"
    quantize(folder / "plain", folder / "coded", form)
    return folder / "coded"


def outcome(family: str, form: str, folder: Path) -> str:
    """``=``, nothing, or why the steps are not equal."""
    checkpoint = written(family, form, folder)
    if checkpoint is None:
        return ""
    try:
        with Engine(open_checkpoint(checkpoint)) as replayer:
            replayer.export(folder / "decoded")
        resident: Any = AutoModelForCausalLM.from_pretrained
        model, found = train_lora(checkpoint, ["auto"], lambda: resident(folder / "decoded", dtype="auto"), STEPS)
    except ZO2Error as error:
        return f"refused: {type(error).__name__}, found {error.found}"
    if found["outcome"] != "equal":
        return "different"
    specs = [spec for layout in model.layouts for spec in layout.parameters]
    coded = [spec for spec in specs if spec.encoding is not None]
    stacks = [spec for spec in specs if len(spec.shape) == 3 and min(spec.shape) > 1]  # without convolutions
    if form != "bfloat16" and not coded:
        return "equal, and no weight of this checkpoint is in the format"
    return "equal, with experts in bfloat16" if form != "bfloat16" and not {*stacks} <= {*coded} else "="


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=[*DENSE, *MIXTURES])
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, dict[str, str]] = {}
    reasons: list[str] = []
    print("| family |" + " | ".join(options.formats) + " |\n" + "|---" * (1 + len(options.formats)) + "|")
    for family in options.families:
        found[family] = {}
        for form in options.formats:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found[family][form] = outcome(family, form, Path(folder))
                except Exception as error:  # of transformers or peft, or a defect: the table lists it
                    found[family][form] = f"failed: {type(error).__name__}: {str(error)[:200]}"
        cells = []
        for text in found[family].values():
            if text not in ("", "=", *reasons):
                reasons.append(text)
            cells.append(text if text in ("", "=") else str(reasons.index(text) + 1))
        print(f"| {family} | " + " | ".join(cells) + " |", flush=True)
    print("\n" + "\n".join(f"{number}. {text}" for number, text in enumerate(reasons, 1)))
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
