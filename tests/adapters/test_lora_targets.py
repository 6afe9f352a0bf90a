"""The layers that LoRA's ``auto`` chooses: those that the model's forward calls and peft takes."""

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import batch, small_config, small_model
from profiles import short_first
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.models.architecture import architecture_of
from zo2adapters.models.batches import CAUSAL_LM
from zo2adapters.models.export import export_merged
from zo2adapters.models.module_use import ModuleUse, _RecordedForward, module_use
from zo2adapters.models.peft_adapter import base_form
from zo2adapters.models.skeleton import build_skeleton
from zo2core import Engine, LowRankPerturbation, MeZOSGD, ZerothOrder
from zo2core.errors import OptionError, UnsupportedModelError

peft: Any = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:.*falling back to its reference")

# names of layers that a family's forward calls and that ``auto`` leaves out: peft refuses them, or
# takes them for parts of experts, or they are routers
LEFT_OUT: dict[str, set[str]] = {
    **{family: {"out_proj"} for family in ("mamba", "mamba2", "falcon_mamba", "falcon_h1")},
    "longcat_flash": {"gate_proj", "up_proj", "down_proj"},
    "hunyuan_v1_moe": {"gate_proj", "up_proj", "down_proj", "wg"},
    "jetmoe": {"layer"},
    **{family: set() for family in ("jamba", "zamba2", "gemma3n_text", "bamba", "lfm2_moe")},
}

SHORT = ["mamba", "jamba", "zamba2", "hunyuan_v1_moe"]


def save(family: str, directory: Path) -> Path:
    small_model(small_config(family)).save_pretrained(directory)
    return directory


def lora(targets: list[str], **options: Any) -> Any:
    return peft.LoraConfig(r=2, target_modules=targets, **options)


def opened(base: Path, targets: list[str], *, is_trained: bool = True) -> Any:
    config = lora(targets, init_lora_weights=False)
    return open_checkpoint(base, adapter=Adapter(config=config, seed=1, is_trained=is_trained))


def adapted(model: Any) -> set[str]:
    """Paths of the layers of the base that have an adapter."""
    names = (spec.name for layout in model.layouts for spec in layout.parameters)
    found = (name.partition(".lora_A.") for name in names)
    return {base_form(f"{path}.").rstrip(".") for path, is_lora, _ in found if is_lora}


def called_layers(whole: PreTrainedModel) -> Iterator[str]:
    """Linear layers before the head that a real forward calls."""
    called = set[nn.Module]()
    for module in whole.modules():
        module.register_forward_hook(lambda module, *_: called.add(module))
    with torch.inference_mode():
        whole(**batch(), use_cache=False)
    output: Any = whole.get_output_embeddings
    for path, module in whole.named_modules():
        if module in called and isinstance(module, nn.Linear) and module is not output():
            yield path


@pytest.mark.parametrize("family", short_first(SHORT, sorted(LEFT_OUT.keys() - SHORT)))
def test_auto_is_the_layers_that_a_forward_calls_and_peft_takes(
    family: str, tmp_path: Path
) -> None:
    targets = adapted(opened(save(family, tmp_path), ["auto"]))
    whole = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = {
        path for path in called_layers(whole) if path.rpartition(".")[2] not in LEFT_OUT[family]
    }
    assert targets == expected
    peft.inject_adapter_in_model(lora(sorted(targets)), whole)  # which refuses none


@pytest.mark.parametrize("family", short_first(["jamba"], ["longcat_flash"]))
def test_what_zeroth_order_steps_have_learned_is_merged(family: str, tmp_path: Path) -> None:
    model = opened(save(family, tmp_path / "base"), ["auto"])
    with Engine(model, ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-2))) as engine:
        for _ in range(3):
            engine.step(batch())
        loss = engine.evaluate([batch()]).loss
        export_merged(engine, model, tmp_path / "merged")
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.inference_mode():
        assert merged(**batch(), use_cache=False).loss.item() == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize(
    "config", [partial(lora), lambda targets: peft.LoHaConfig(r=2, target_modules=targets)]
)
def test_a_layer_that_is_never_called_is_refused_by_name_unless_it_is_only_read(
    config: Any, tmp_path: Path
) -> None:
    base = save("jamba", tmp_path)
    adapter = partial(Adapter, config=config(["q_proj", "dt_proj"]))
    with pytest.raises(OptionError, match=r"layers\.0\.mamba\.dt_proj, which jamba's forward"):
        open_checkpoint(base, adapter=adapter())
    read: Any = open_checkpoint(base, adapter=adapter(is_trained=False))
    with Engine(read) as engine:
        assert engine.evaluate([batch()]).loss > 0


def test_a_layer_that_peft_refuses_is_refused_in_its_words(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="Module 'out_proj' is incompatible with Mamba"):
        opened(save("mamba", tmp_path), ["in_proj", "out_proj"])


def test_a_weight_that_is_used_without_its_layer_gets_no_low_rank_direction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save("llama", tmp_path)
    perturbation = LowRankPerturbation(rank=2, period=2)
    method = ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-2), perturbation=perturbation)
    Engine(open_checkpoint(base), method).close()

    def without_its_layer(self: Any, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.up_proj(x), self.down_proj.weight)

    monkeypatch.setattr(LlamaMLP, "forward", without_its_layer)
    named = r"layers\.0\.mlp\.down_proj\.weight: found a weight that is used without its layer"
    with pytest.raises(UnsupportedModelError, match=named):
        Engine(open_checkpoint(base), method)


def test_models_that_are_alike_are_run_once_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def use_of(model_type: str) -> tuple[Any, ModuleUse]:
        skeleton = build_skeleton(small_config(model_type), torch.float32)
        return skeleton, module_use(skeleton, architecture_of(skeleton, CAUSAL_LM, None))

    monkeypatch.setattr("zo2adapters.models.module_use._FOUND", {})
    first, use = use_of("opt")
    is_kept = weakref.ref(first)
    del first
    gc.collect()
    assert is_kept() is None
    monkeypatch.setattr(_RecordedForward, "forward", None)
    assert use_of("opt")[1] is use
    with pytest.raises(TypeError):
        use_of("mistral")


def test_what_a_forward_without_values_does_not_reach_is_not_said_to_be_unused() -> None:
    skeleton = build_skeleton(small_config("jetmoe"), torch.float32)
    use = module_use(skeleton, architecture_of(skeleton, CAUSAL_LM, None))
    assert use.idle == set()
    skeleton = build_skeleton(small_config("jamba"), torch.float32)
    use = module_use(skeleton, architecture_of(skeleton, CAUSAL_LM, None))
    assert {path.rpartition(".")[2] for path in use.idle} == {"dt_proj", "conv1d"}
