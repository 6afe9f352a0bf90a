"""Time generation with a mixture: experts read when tokens are routed to them, against all experts read and decoded.

Tokens are sampled, so that other experts are chosen for each, also by a sparse file's zeros.

python tools/make_checkpoint.py qwen3-30b-a3b qwen3-30b-a3b-nf4 --dtype bfloat16 --sparse --nf4
python tools/bench_routed.py qwen3-30b-a3b-nf4 --memory 6GiB --output routed.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from zo2adapters import open_checkpoint
from zo2adapters.tasks.generation import generate
from zo2adapters.tasks.next_token import sampling_of
from zo2core import Engine, MemoryPolicy

ROOM = 256 << 20  # bytes of activations


def side(path: Path, memory: str, prompt: list[int], tokens: int, *, routed: bool) -> dict[str, Any]:
    """Seconds of each token, of which the first passes the prompt; the tokens; and what was read of the experts."""
    model = open_checkpoint(path)
    whole = sum(spec.nbytes for layout in model.layouts for spec in layout.parameters if len(spec.shape) == 3)
    experts = model.route(tokens=1) if routed else None
    room = ROOM + (experts.buffer_bytes if experts is not None else 0)
    seconds, read, made = [], [], []
    with Engine(model, memory=MemoryPolicy(host=memory, activations=room)) as engine:
        if experts is not None and engine.host_plan is not None:
            experts.capacity = max(engine.host_plan.spare, 0)
        before, bytes_before = time.perf_counter(), 0
        for (token,) in generate(engine, model, [prompt], max_new_tokens=tokens, sampling=sampling_of(1.0, 1.0, 0)):
            seconds.append(time.perf_counter() - before)
            if experts is not None:
                read.append(experts.read_bytes - bytes_before)
                bytes_before = experts.read_bytes
            made.append(token)
            before = time.perf_counter()
    kept = None if experts is None else experts.capacity
    return {"seconds": seconds, "tokens": made, "expert bytes read": read, "expert bytes": whole, "kept": kept}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory", default="6GiB")
    parser.add_argument("--prompt-tokens", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--all-tokens", type=int, default=3, help="tokens of the side that reads all experts")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    prompt = torch.randint(3, 1000, (options.prompt_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    found = {
        "routed": side(options.model, options.memory, prompt, options.tokens, routed=True),
        "all": side(options.model, options.memory, prompt, options.all_tokens, routed=False),
    }
    count = min(options.tokens, options.all_tokens)
    assert found["routed"]["tokens"][:count] == found["all"]["tokens"][:count], "both sides give the same tokens"
    for name, one in found.items():
        later = one["seconds"][1:]
        print(f"{name:7s} prompt {one['seconds'][0]:6.1f} s, a token {statistics.median(later):6.2f} s")
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
