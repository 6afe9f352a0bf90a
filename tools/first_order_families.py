"""Test in which decoder families first-order steps equal the resident model's: LoRA on tiny models, against peft.

    python tools/first_order_families.py --output first-order-families.json

Every family of the installed transformers that `tools/families.py` can build is trained with LoRA for three steps of SGD on
a padded batch, in float32. By default LoRA is on all linear layers but the head, experts and routers. `--targets auto
experts` adds the experts. Families that cannot be opened or differentiated block by block are listed with the error.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from families import VOCABULARY, small_config, small_model
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from zo2adapters import Adapter, open_checkpoint
from zo2core import Engine, FirstOrder, ZO2Error

STEPS = 3
LR = 1e-2


def batch() -> dict[str, torch.Tensor]:
    """A batch of two rows of six tokens, one of them padded on the right."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, 6), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def trained_by_peft(
    whole: Any, config: Any, first: dict[str, torch.Tensor], rows: dict[str, torch.Tensor], *, steps: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train peft's adapter on the whole model from its first values; return losses and parameters."""
    peft.inject_adapter_in_model(config, whole)
    for name, parameter in whole.named_parameters():
        parameter.requires_grad = name in first
        # Memory mapped from a file has another alignment than allocated memory, with which products round differently.
        parameter.data = first.get(name, parameter.data).clone()
    trained = {name: parameter for name, parameter in whole.named_parameters() if name in first}
    optimizer, losses = torch.optim.SGD(trained.values(), lr=LR), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = whole(**rows, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: parameter.detach() for name, parameter in trained.items()}


def compare(model_type: str, directory: Path, targets: list[str]) -> dict[str, Any]:
    """Test one family; its ``outcome`` is equal, different, refused, or not built."""
    try:
        small_model(small_config(model_type)).save_pretrained(directory)
        whole: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        optimizer = partial(torch.optim.SGD, lr=LR)
        model: Any = open_checkpoint(directory, adapter=Adapter(config=config, seed=1))
    except ZO2Error as error:
        return {"outcome": "refused", "error": str(error)[:300]}
    except Exception as error:  # transformers or peft may fail on such a tiny model
        return {"outcome": "not built", "error": f"{type(error).__name__}: {str(error)[:200]}"}
    try:
        with Engine(model, FirstOrder(optimizer)) as engine:
            first = {name: parameter.detach().clone() for name, parameter in engine.parameters.items()}
            losses = [engine.step(batch()).loss for _ in range(STEPS)]
            learned = {name: value.clone() for name, value in engine.parameters_now() if name in first}
    except ZO2Error as error:
        return {"outcome": "refused", "error": str(error)[:300]}
    expected, trained = trained_by_peft(whole, model.adapter.config, first, batch(), steps=STEPS)
    other = [name for name, value in learned.items() if not torch.equal(value, trained[name])]
    is_equal = not other and losses == expected
    return {"outcome": "equal" if is_equal else "different", "losses": [losses, expected], "parameters": other[:5]}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    parser.add_argument("--targets", nargs="+", default=["auto"], help="layers with an adapter")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    families: dict[str, Any] = {}
    for model_type in options.families:
        with tempfile.TemporaryDirectory() as directory:
            try:
                families[model_type] = compare(model_type, Path(directory), options.targets)
            except Exception as error:  # a defect, which the table lists
                families[model_type] = {"outcome": "failed", "error": f"{type(error).__name__}: {str(error)[:300]}"}
        found = families[model_type]
        print(f"{model_type:28s} {found['outcome']:10s} {found.get('error', '')[:120]}", flush=True)
    counts = dict(Counter(family["outcome"] for family in families.values()))
    print(counts)
    if options.output is not None:
        common = {"transformers": transformers.__version__, "steps": STEPS, "targets": options.targets}
        measured = {**common, "counts": counts, "families": families}
        options.output.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
