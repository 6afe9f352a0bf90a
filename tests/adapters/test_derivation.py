"""An architecture that nobody declared: its parts are learned from a dry run, or it is refused by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import zeroth_order
from families import compare, small_config, small_model
from models import CONFIGS
from models import small_config as known_config
from parity import assert_same_bits, assert_same_weights
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from zo2adapters import MonolithicMeZO, open_checkpoint
from zo2adapters.models.architecture import ARCHITECTURES
from zo2adapters.models.derivation import derive_architecture
from zo2adapters.models.skeleton import build_skeleton
from zo2adapters.trainers.verification import random_batch
from zo2core import Engine, MemoryPolicy, MeZOSGD, ZerothOrder
from zo2core.errors import UnsupportedModelError
from zo2core.planning.memory import HostPlan

UNDECLARED = ["mistral", "gpt2", "bloom", "phi", "gemma2", "gpt_bigcode", "gptj", "codegen", "openai-gpt", "olmo2"]
UNDECLARED += ["recurrent_gemma", "mamba", "jamba", "gemma3n_text", "gemma4_text", "zamba2"]


@pytest.mark.parametrize("model_type", CONFIGS)
def test_what_is_derived_is_what_was_declared(model_type: str) -> None:
    declared = ARCHITECTURES[model_type]
    skeleton = build_skeleton(known_config(model_type), torch.float32)
    present = dict(skeleton.named_modules())
    derived = derive_architecture(skeleton)
    assert set(derived.embedding) == {path for path in declared.embedding if path in present}
    assert set(derived.head) == {path for path in declared.head if path in present}
    assert (derived.blocks, derived.returned) == (declared.blocks, declared.returned)


@pytest.mark.few(5)
@pytest.mark.parametrize("model_type", UNDECLARED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_families_that_nobody_declared_are_monolithic_mezo(
    model_type: str, dtype: torch.dtype, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    is_short = not request.config.getoption("--long")
    if is_short and dtype is torch.float32 and model_type != "recurrent_gemma":  # whose last bit depends on the kernel
        pytest.skip("in bfloat16 more can differ; float32 is for the long profile")
    config = small_config(model_type)
    compared = compare(small_model(config), dtype, tmp_path / "model")
    assert compared["outcome"] == "equal", compared


@pytest.mark.few(2)
@pytest.mark.parametrize("precision", ["exact", "mixed"])
@pytest.mark.parametrize("buckets", [None, 1], ids=["resident", "streamed"])
def test_what_layers_share_is_the_embeddings_and_they_borrow_it(tmp_path: Path, precision: str, buckets: int | None) -> None:
    autocast = torch.bfloat16 if precision == "mixed" else None
    made: Any = small_model(small_config("zamba2"))
    made.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    stored = torch.float32 if autocast else torch.bfloat16
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=stored)
    numbers: dict[str, Any] = {"lr": 1e-2, "zo_eps": 1e-2}
    literal = MonolithicMeZO(whole, autocast=autocast, **numbers)
    model = open_checkpoint(tmp_path / "base", precision=precision, loss_chunk=None)
    common = {spec.name for layout in model.layouts[1:-1] for spec in layout.borrowed}
    assert any("shared_transformer" in name for name in common)
    assert common <= {spec.name for spec in model.layouts[0].parameters}
    memory = MemoryPolicy(host=HostPlan((), budget=2**28, buckets=buckets, keep_noise=False))
    batch = random_batch(40, 2, 6, seed=0)
    with zeroth_order(model, MeZOSGD(**numbers), memory=memory) as engine:
        for _ in range(3):
            result = engine.step(batch)
            assert result.losses == literal.step(batch, *result.seeds).losses
        assert_same_weights(engine.parameters_now(), whole.named_parameters())


@pytest.mark.parametrize("model_type", ["codegen", "gpt_neo"])
def test_monolithic_mezo_caches_no_keys_and_values(model_type: str, tmp_path: Path) -> None:
    """CodeGen rounds the keys that it caches; neither the engine nor the loop that it is held against caches any."""
    made: Any = small_model(small_config(model_type))
    made.to(torch.bfloat16).save_pretrained(tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert whole.config.use_cache
    literal = MonolithicMeZO(whole, lr=1e-2, zo_eps=1e-2)
    batch = random_batch(40, 2, 6, seed=0)
    with Engine(open_checkpoint(tmp_path), ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-2))) as engine:
        for _ in range(3):
            result = engine.step(batch)
            assert result.losses == literal.step(batch, *result.seeds).losses
        assert_same_weights(engine.parameters_now(), whole.named_parameters())
    assert whole.config.use_cache, "the config is the caller's"


def test_tables_that_no_checkpoint_holds_are_those_of_from_pretrained(tmp_path: Path) -> None:
    config = small_config("codegen")
    model: torch.nn.Module = small_model(config)
    model.to(torch.bfloat16)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ours = dict(build_skeleton(config, torch.bfloat16).named_buffers())
    tables = [name for name, _ in loaded.named_buffers()]
    assert tables
    for name, table in loaded.named_buffers():
        assert_same_bits(name, ours[name], table)


def test_weights_that_transformers_writes_over_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"model.embed_tokens: .*overwrites.*zero_"):
        build_skeleton(small_config("youtu"), torch.float32)


def test_a_dry_run_leaves_the_model_as_it_was() -> None:
    skeleton = build_skeleton(known_config("llama"), torch.float32)

    def state(model: PreTrainedModel) -> list[Any]:
        tensors = [(name, id(tensor)) for name, tensor in (*model.named_parameters(), *model.named_buffers())]
        return [tensors, [(name, id(module), len(module._forward_pre_hooks)) for name, module in model.named_modules()]]

    before = state(skeleton)
    derive_architecture(skeleton)
    assert state(skeleton) == before


class _Odd(nn.Module):
    """A decoder that calls its parts in an odd way."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.table, self.out = nn.Embedding(9, 4), nn.Linear(4, 9)
        if how in ("between", "before and after", "idle"):
            self.extra = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.config = known_config("llama")

    def forward(self, input_ids: torch.Tensor, use_cache: bool, labels: torch.Tensor | None = None) -> SimpleNamespace:
        if self.how == "longer rows" and input_ids.shape[1] == 1:
            raise IndexError("one token is too short")
        hidden, other = self.table(input_ids), None
        embedded, past = hidden, []
        if self.how == "before and after":
            hidden = self.extra(hidden)
        for index, layer in enumerate(reversed(self.layers) if self.how == "reversed" else self.layers):
            if self.how == "between" and index == 1:
                self.extra(hidden)
            if self.how == "two values":
                hidden, other = layer(hidden, other)
                continue
            hidden = layer(hidden)
            past.append(hidden)
            if self.how == "changed":
                hidden = hidden * 2
            if self.how == "kept as it is":
                hidden = hidden.to(hidden.dtype).contiguous()
        if self.how == "skipped":
            hidden = hidden + embedded
        if self.how == "looked back":
            hidden = hidden + past[0]
        if self.how == "before and after":
            hidden = self.extra(hidden)
        logits = self.out(hidden)
        if labels is None:
            return SimpleNamespace(logits=logits)
        asked = labels[:, 1:] if self.how == "shifted" else labels
        loss = vars(self)["_loss_function"](logits * 2 if self.how == "scaled" else logits, asked)
        return SimpleNamespace(logits=logits, loss=loss + 1 if self.how == "added" else loss)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("between", "extra, called between two layers"),
        ("before and after", "extra, called before the layers and after them"),
        ("reversed", "layer 2 is called after 0 layers"),
        ("changed", "what layer 0 returned is used outside of layer 1"),
        ("looked back", "what layer 0 returned is used outside of layer 1"),
        ("skipped", "what is computed before the layers is used after them"),
        ("two values", "layer 1 gets more of layer 0 than its hidden states"),
        ("longer rows", "no rows of one token .IndexError"),
        ("idle", "extra.weight, a parameter whose module is never called"),
        ("shifted", "a loss other than that of the next token"),
        ("scaled", "a loss other than that of the next token"),
        ("added", "a loss other than that of the next token"),
    ],
)
def test_what_cannot_be_told_apart_is_refused_by_name(how: str, said: str) -> None:
    model: Any = _Odd(how)
    with pytest.raises(UnsupportedModelError, match=said):
        derive_architecture(model)


def test_tensors_that_are_passed_on_as_they_are_may_be_asked_for_a_dtype() -> None:
    model: Any = _Odd("kept as it is")
    assert derive_architecture(model).embedding == ("table",)
