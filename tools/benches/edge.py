"""A step of a program in ExecuTorch's runtime: against the same module in torch, and against two
forwards in turn.

    python tools/bench.py edge
    python tools/bench.py edge --layers 8 --hidden 768 --shapes 1x16,4x64

Sides are a program whose forward is XNNPACK's, one of the portable kernels, the exported module in
torch, and plain LoRA-FA over peft's model, which perturbs B in its weights and runs two forwards. A
Llama with random weights, LoRA of the queries and values. Torch has all cores, as XNNPACK has;
`taskset -c 0` gives all of them one.
"""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from measuring import alternate, lora, lora_fa, seconds_of, shapes, timed
from transformers import LlamaConfig, LlamaForCausalLM

from zo2adapters import Adapter, TrainingProgram, open_checkpoint, write_program
from zo2adapters.edge.program import assemble
from zo2adapters.trainers.verification import random_batch

VOCABULARY = 4000
# with matrices B that are not zero
LORA: dict[str, Any] = {"rank": 8, "lora_alpha": 8, "init_lora_weights": False}
ZO_EPS, LR = 1e-3, 1e-6


def edge(
    *,
    layers: int = 4,
    hidden: int = 512,
    shapes: Annotated[Sequence[tuple[int, int]], shapes, "shapes of batches, as rows x tokens"] = (
        (1, 16),
        (1, 64),
    ),
    steps: int = 9,
) -> dict[str, Any]:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(base := Path(folder, "base"))
        return {f"{rows} x {tokens}": bench(base, rows, tokens, steps) for rows, tokens in shapes}


def bench(base: Path, rows: int, tokens: int, steps: int) -> dict[str, Any]:
    batch = dict(random_batch(VOCABULARY, rows, tokens, seed=0))
    model = open_checkpoint(base, adapter=Adapter(config=lora(**LORA), frozen=("lora_A",)))
    lowering: dict[str, float] = {}
    sides: dict[str, Callable[[], object]] = {}
    for name, partitioners in (("XNNPACK", None), ("portable kernels", ())):
        path = base.parent / f"{name}-{rows}x{tokens}.pte"
        write = partial(
            write_program,
            path,
            model,
            rows=rows,
            tokens=tokens,
            zo_eps=ZO_EPS,
            partitioners=partitioners,
        )
        lowering[name], _ = timed(write)
        sides[name] = partial(TrainingProgram(path).step, batch, lr=LR)
    module = assemble(model, rows=rows, tokens=tokens, zo_eps=ZO_EPS, seed=0).step
    sides["module in torch"] = torch.inference_mode()(
        partial(module, batch["input_ids"], batch["labels"], torch.tensor(LR))
    )
    mezo = lora_fa(base, lora(**LORA), lr=LR, zo_eps=ZO_EPS, perturb_in_place=False)
    sides["two forwards"] = partial(mezo.step, batch, 0)
    return {"seconds": seconds_of(alternate(sides, steps)), "seconds of lowering": lowering}
