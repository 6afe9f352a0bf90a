"""Models that read images, too: MeZO bit for bit, with images and without, and images that are not
the rows' refused.
"""

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from command_lines import ROWS, done, write_rows
from engines import assert_equal, really_held, zeroth_order
from models import save_model, save_tokenizer
from parity import assert_steps_alike
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from peft_models import monolithic
from runs import weights_of
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AyaVisionConfig,
    Gemma3Config,
    Idefics3Config,
    InternVLConfig,
    Llama4Config,
    LlavaConfig,
    LlavaNextConfig,
    Mistral3Config,
    PaliGemmaConfig,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    SmolVLMConfig,
)
from whole_loops import WholeModel, torch_loop

from zo2adapters import Adapter, MonolithicMeZO, generate, open_checkpoint
from zo2adapters.models.export import export_merged
from zo2adapters.models.footprint import vision_bytes
from zo2core import Engine, FirstOrder, LowRankPerturbation, MeZOSGD, ZerothOrder
from zo2core.errors import BatchError, CheckpointError, UnsupportedModelError

NUMBERS: dict[str, Any] = {"lr": 1e-2, "zo_eps": 1e-2}
IMAGE, BEFORE, BEHIND = 39, 38, 37  # tokens
TEXT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
QWEN: dict[str, Any] = {
    "text_config": {
        **TEXT,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1], "rope_theta": 1e4},
    },
    "image_token_id": IMAGE,
    "vision_start_token_id": BEFORE,
    "vision_end_token_id": BEHIND,
    "video_token_id": 36,
}
QWEN_TOWER = {
    "depth": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llava": LlavaConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "clip_vision_model", "projection_dim": 16, **TOWER},
        image_token_index=IMAGE,
    ),
    "gemma3": Gemma3Config(
        text_config={"model_type": "gemma3_text", **TEXT},
        vision_config={"model_type": "siglip_vision_model", **TOWER},
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=BEFORE,
        eoi_token_index=BEHIND,
    ),
    "mistral3": Mistral3Config(
        text_config={"model_type": "mistral", **TEXT},
        vision_config={"model_type": "pixtral", "head_dim": 8, **TOWER},
        image_token_index=IMAGE,
        spatial_merge_size=1,
    ),
    "qwen2_5_vl": Qwen2_5_VLConfig(
        **QWEN,
        vision_config={
            **QWEN_TOWER,
            "intermediate_size": 24,
            "out_hidden_size": 16,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    ),
    "qwen2_vl": Qwen2VLConfig(
        **QWEN,
        vision_config={
            "depth": 2,
            "embed_dim": 16,
            "num_heads": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "hidden_size": 16,
            "mlp_ratio": 2,
        },
    ),
    "internvl": InternVLConfig(
        text_config={"model_type": "qwen2", **TEXT},
        vision_config={**TOWER, "image_size": [8, 8], "patch_size": [4, 4]},
        image_token_id=IMAGE,
        downsample_ratio=1.0,
    ),
    "idefics3": Idefics3Config(
        text_config={"model_type": "llama", **TEXT},
        vision_config=TOWER,
        image_token_id=IMAGE,
        scale_factor=1,
    ),
    "smolvlm": SmolVLMConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config=TOWER,
        image_token_id=IMAGE,
        scale_factor=1,
    ),
    "paligemma": PaliGemmaConfig(
        text_config={"model_type": "gemma", **TEXT},
        vision_config={"model_type": "siglip_vision_model", **TOWER},
        image_token_index=IMAGE,
        projection_dim=16,
    ),
}
FAMILIES = sorted(CONFIGS)
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
LINEAR: dict[str, Any] = {
    **TEXT,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "rope_parameters": ROPE,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}
PATCHES = {**QWEN_TOWER, "intermediate_size": 24, "out_hidden_size": 16}
PATCHES |= {"num_position_embeddings": 16}
# models without a declaration, which are trained on text alone
FOR_TEXT: dict[str, PretrainedConfig] = {
    "qwen3_vl": Qwen3VLConfig(
        **{**QWEN, "text_config": {**TEXT, "head_dim": 8, "rope_parameters": ROPE}},
        vision_config={**PATCHES, "deepstack_visual_indexes": [0, 1]},
    ),
    "llama4": Llama4Config(
        text_config={
            **TEXT,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 32,
        },
        vision_config={
            **TOWER,
            "intermediate_size": 64,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
        image_token_index=IMAGE,
    ),
    # whose ``image_newline`` is a parameter beside the modules
    "llava_next": LlavaNextConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "clip_vision_model", "projection_dim": 16, **TOWER},
        image_token_index=IMAGE,
        image_grid_pinpoints=[[8, 8]],
    ),
    "aya_vision": AyaVisionConfig(
        text_config={"model_type": "cohere2", **TEXT},
        vision_config={"model_type": "siglip_vision_model", **TOWER, "vision_use_head": False},
        image_token_index=IMAGE,
        adapter_layer_norm_eps=1e-6,
        downsample_factor=2,
    ),
    "qwen3_5": Qwen3_5Config(**{**QWEN, "text_config": LINEAR}, vision_config=PATCHES),
    "qwen3_5_moe": Qwen3_5MoeConfig(
        **{**QWEN, "text_config": {**LINEAR, **EXPERTS}}, vision_config=PATCHES
    ),
}
WHOLE = ("qwen2_5_vl", "qwen2_vl")  # whose images are patches one after the other


def saved(directory: Path, config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> Path:
    return save_model(directory, config, dtype, auto_class=AutoModelForImageTextToText)


def whole_model(base: Path, dtype: torch.dtype = torch.float32) -> Any:
    model: Any = AutoModelForImageTextToText.from_pretrained(base, dtype=dtype)
    model.config.get_text_config().use_cache = False
    return model.eval()


def batch_of(
    family: str, seed: int, dtype: torch.dtype = torch.float32, *, images: int = 3
) -> dict[str, torch.Tensor]:
    """Three rows; the first ones have an image each, of four tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 36, (3, 11), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    ids[:images, 1], ids[:images, 2:6], ids[:images, 6] = BEFORE, IMAGE, BEHIND
    batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill((mask == 0) | (ids >= 36), -100),
    }
    if not images:
        return batch
    kinds = (ids == IMAGE).long()
    if family in WHOLE:
        patches = torch.randn(16 * images, 96, generator=generator).to(dtype)
        grid = torch.tensor([[1, 4, 4]] * images)
        return {
            **batch,
            "pixel_values": patches,
            "image_grid_thw": grid,
            "mm_token_type_ids": kinds,
        }
    batch["pixel_values"] = torch.randn(images, 3, 8, 8, generator=generator).to(dtype)
    if family in ("idefics3", "smolvlm"):  # of each row
        batch["pixel_values"] = batch["pixel_values"][:, None]
    if family in ("gemma3", "paligemma"):
        batch["token_type_ids"] = kinds
    if family == "mistral3":
        batch["image_sizes"] = torch.tensor([[8, 8]] * images)
    return batch


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_monolithic_mezo(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    base = saved(tmp_path / "base", CONFIGS[family], dtype)
    whole = whole_model(base, dtype)
    literal = MonolithicMeZO(whole, **NUMBERS)
    with zeroth_order(open_checkpoint(base, precision="exact"), MeZOSGD(**NUMBERS)) as engine:
        steps = [
            batch_of(family, seed, dtype, images=images) for seed, images in enumerate([3, 0, 1])
        ]
        assert_steps_alike(engine, literal, steps)
        batches = [
            batch_of(family, seed, dtype, images=images) for seed, images in [(3, 3), (4, 0)]
        ]
        assert engine.evaluate(batches).losses == tuple(
            literal.loss(batch).item() for batch in batches
        )
        assert any("vision" in name or "visual" in name for name, _ in engine.parameters_now())
        engine.export(tmp_path / "out")
    assert weights_of(tmp_path / "out").keys() == weights_of(base).keys()
    again = whole_model(tmp_path / "out", dtype)
    with torch.inference_mode():
        for batch in batches:
            assert torch.equal(again(**batch).loss, whole(**batch).loss)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_in_mixed_precision_it_is_monolithic_mezo_under_autocast(
    tmp_path: Path, family: str
) -> None:
    base = saved(tmp_path / "base", CONFIGS[family], torch.bfloat16)
    literal = MonolithicMeZO(whole_model(base), autocast=torch.bfloat16, **NUMBERS)
    with zeroth_order(
        open_checkpoint(base, precision="mixed", loss_chunk=None), MeZOSGD(**NUMBERS)
    ) as engine:
        assert_steps_alike(engine, literal, [batch_of(family, seed) for seed in range(2)])


@pytest.mark.few(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_micro_batches_take_their_images_along_or_are_refused(tmp_path: Path, family: str) -> None:
    base = saved(tmp_path / "base", CONFIGS[family])
    batch = batch_of(family, 0)
    with zeroth_order(open_checkpoint(base), MeZOSGD(**NUMBERS)) as engine:
        together = engine.step(batch, seed=1).losses
    with zeroth_order(open_checkpoint(base), MeZOSGD(**NUMBERS), micro_batch_size=1) as engine:
        if family not in WHOLE:
            assert engine.step(batch, seed=1).losses == pytest.approx(together, rel=1e-5)
            batch = batch_of(family, 0, images=2)
        with pytest.raises(BatchError, match=r"pixel_values.*micro-batches"):
            engine.step(batch)
        assert engine.version == (0 if family in WHOLE else 1)
        assert engine.step(batch_of(family, 0, images=0)).step == engine.version - 1


@pytest.mark.few(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_text_after_images_is_generated_as_without_them(tmp_path: Path, family: str) -> None:
    base = saved(tmp_path / "base", CONFIGS[family])
    prompts = [[7, 3, 11, 20], [5, 9]]
    stock = whole_model(base)
    ids, mask = (
        torch.tensor([[7, 3, 11, 20], [0, 0, 5, 9]]),
        torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]),
    )
    wanted = stock.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=5,
        do_sample=False,
        eos_token_id=None,
        use_cache=True,
    )
    model = open_checkpoint(base)
    with Engine(model) as replayer:
        replayer.evaluate([batch_of(family, 0)])
        columns = list(generate(replayer, model, prompts, max_new_tokens=5))
    assert [list(row) for row in zip(*columns, strict=True)] == wanted[:, 4:].tolist()


@pytest.mark.few(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_batch_holds_is_known_ahead_and_the_tower_runs_once_a_forward(
    tmp_path: Path, family: str
) -> None:
    model = open_checkpoint(saved(tmp_path / "base", CONFIGS[family]), precision="exact")
    [tower] = [
        module
        for name, module in model.skeleton.named_modules()
        if name in ("model.vision_tower", "model.visual", "model.vision_model")
    ]
    with Engine(model) as replayer:
        with patch.object(tower, "forward", wraps=tower.forward) as forward:
            replayer.evaluate([batch_of(family, seed) for seed in range(3)])
        assert forward.call_count == 3
        for images in (3, 0):
            with torch.inference_mode():
                batch = model.prepared(batch_of(family, 0, images=images))
                held = really_held(model.embed(batch))
            assert held <= model.held_bytes(batch) <= 2 * held
            if images:
                pixels, patches = batch["pixel_values"], images * (16 if family in WHOLE else 4)
                feed_forward = 32 if family == "qwen2_vl" else 24
                assert vision_bytes(model.config, pixels) == pixels.nbytes + patches * 4 * (
                    8 * 16 + 3 * feed_forward
                )
                assert model.forward_bytes(batch) >= vision_bytes(model.config, pixels)


def test_what_is_of_no_use_beside_images_is_refused(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", CONFIGS["llava"])
    with pytest.raises(UnsupportedModelError, match="a prefix on a model that reads images"):
        open_checkpoint(
            base,
            adapter=Adapter(config=PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
        )
    estimator = MeZOSGD(lr=1e-2, zo_eps=1e-2, perturb_in_place=False)
    with pytest.raises(UnsupportedModelError, match="matrices and vectors"):
        Engine(
            open_checkpoint(base), ZerothOrder(estimator, perturbation=LowRankPerturbation(rank=2))
        )


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_an_adapter_are_those_of_the_whole_model(tmp_path: Path, family: str) -> None:
    base = saved(tmp_path / "base", CONFIGS[family])
    targets = (
        r".*language_model.*\.(q_proj|up_proj)"
        if family == "gemma3"
        else r".*\.(q_proj|up_proj|qkv|fc1)"
    )
    config = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    model = open_checkpoint(base, adapter=Adapter(config=config, seed=1))
    with Engine(model, FirstOrder(partial(torch.optim.SGD, lr=1e-2))) as engine:
        first = {name: value.detach().clone() for name, value in engine.parameters.items()}
        whole = WholeModel(monolithic(base, config, first, auto_class=AutoModelForImageTextToText))
        take = torch_loop(whole, torch.optim.SGD, None, None)
        for seed, images in enumerate([3, 0, 1]):
            batch = batch_of(family, seed, images=images)
            loss = whole.backward([batch])
            take(1e-2)
            assert engine.step(batch).loss == loss
        assert_equal(engine.parameters, {name: whole.parameters[name] for name in first})


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_command_line_trains_them_on_text(tmp_path: Path, family: str) -> None:
    base = saved(tmp_path / "base", CONFIGS[family])
    save_tokenizer(base)
    write_rows(tmp_path / "rows.jsonl", ROWS)
    on_rows = ("--data", tmp_path / "rows.jsonl")
    done(
        "train",
        "--method",
        "zeroth-order",
        "--model",
        base,
        *on_rows,
        "--output",
        tmp_path / "run",
        "--steps",
        2,
        "--lr",
        1e-3,
    )
    done("verify", "--model", base)
    done("plan", "--method", "zeroth-order", "--model", base)
    done("evaluate", "--model", tmp_path / "run" / "model", *on_rows)


@torch.no_grad()
def loss_in(auto: Any, directory: Path, batch: dict[str, torch.Tensor]) -> float:
    """The loss of transformers' model of a class, which finds all of its tensors."""
    whole, info = auto.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return float(whole.eval()(**batch, use_cache=False).loss)


def classes_of(family: str) -> list[Any]:
    """Transformers' classes that load a checkpoint; of some families one is for text alone."""
    has_text_class = family.startswith("qwen3_5")
    return [AutoModelForImageTextToText, *([AutoModelForCausalLM] if has_text_class else [])]


IMAGE_PARTS = ("vision", "visual", "multi_modal", "image")  # of names of tensors


@pytest.mark.few(3)
@pytest.mark.parametrize("family", FOR_TEXT)
def test_text_trains_without_the_parts_for_images_which_exports_keep(
    family: str, tmp_path: Path
) -> None:
    base, batch = saved(tmp_path / "base", FOR_TEXT[family]), batch_of("", 0, images=0)
    before = weights_of(base)
    of_images = {name for name in before if any(part in name for part in IMAGE_PARTS)}
    whole = whole_model(base)
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(all(part not in name for part in IMAGE_PARTS))
    literal = MonolithicMeZO(whole, **NUMBERS)
    with zeroth_order(open_checkpoint(base), MeZOSGD(**NUMBERS)) as engine:
        assert_steps_alike(engine, literal, [batch_of("", seed, images=0) for seed in range(2)])
        trained = engine.evaluate([batch]).loss
        engine.export(tmp_path / "out")
        with pytest.raises(BatchError, match=r"pixel_values.*trained on text alone"):
            engine.step(batch_of("qwen2_5_vl", 0))
    after = weights_of(tmp_path / "out")
    assert after.keys() == before.keys()
    assert of_images == {name for name in after if torch.equal(after[name], before[name])}
    named = (tmp_path / "out" / "config.json").read_text()
    assert f'"{type(whole).__name__}"' in named
    assert {loss_in(auto, tmp_path / "out", batch) for auto in classes_of(family)} == {trained}


def one_image(family: str) -> dict[str, torch.Tensor]:
    """A row with an image, as the model's processor makes it."""
    generator = torch.Generator().manual_seed(5)
    tokens = {"llava_next": 10, "llama4": 1, "aya_vision": 1}.get(family, 4)
    ids = torch.tensor([[7, 9, BEFORE, *[IMAGE] * tokens, BEHIND, 11, 20]])
    row = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    pixels = torch.randn(1, 3, 8, 8, generator=generator)
    if family.startswith("qwen"):
        row["pixel_values"] = torch.randn(16, 96, generator=generator)
        row["image_grid_thw"] = torch.tensor([[1, 4, 4]])
        row["mm_token_type_ids"] = (ids == IMAGE).long()
    elif family == "llava_next":  # the image as a whole, and its only tile
        row["pixel_values"] = torch.stack([pixels, pixels], 1)
        row["image_sizes"] = torch.tensor([[8, 8]])
    else:
        row["pixel_values"] = pixels
    return row


@pytest.mark.few(3)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft asks for it
@pytest.mark.parametrize("family", FOR_TEXT)
@torch.no_grad()
def test_an_adapter_has_the_names_of_the_class_that_the_checkpoint_names(
    family: str, tmp_path: Path
) -> None:
    base, batch = saved(tmp_path / "base", FOR_TEXT[family]), batch_of("", 0, images=0)
    row = one_image(family)
    expected = whole_model(base)(**row).logits
    # in the vision tower of some, too
    config = LoraConfig(r=2, target_modules=["q_proj", "k_proj", "fc1"])
    model: Any = open_checkpoint(base, adapter=Adapter(config=config, seed=1))
    with Engine(model, FirstOrder(partial(torch.optim.SGD, lr=1.0))) as engine:
        engine.export(tmp_path / "zero")
        engine.step(batch)
        trained = engine.evaluate([batch]).loss
        engine.export(tmp_path / "adapter")
        export_merged(engine, model, tmp_path / "merged")
    zero = PeftModel.from_pretrained(whole_model(base), tmp_path / "zero").eval()
    assert torch.equal(zero(**row).logits, expected)
    loaded = PeftModel.from_pretrained(whole_model(base), tmp_path / "adapter").eval()
    assert loaded(**batch, use_cache=False).loss.item() == trained
    merged = whole_model(tmp_path / "merged")
    torch.testing.assert_close(loaded(**row).logits, merged(**row).logits)
    assert not torch.allclose(loaded(**row).logits, expected, atol=1e-2)
    for auto in classes_of(family):
        assert loss_in(auto, tmp_path / "merged", batch) == pytest.approx(trained, rel=1e-5)
    adapted = {name for name, _ in loaded.named_parameters() if "lora_" in name}
    assert {name.replace(".default", "") for name in adapted} == set(
        weights_of(tmp_path / "adapter")
    )
    assert all("language_model." in name for name in adapted)
    assert weights_of(tmp_path / "merged").keys() == weights_of(base).keys()
    again = open_checkpoint(base, adapter=Adapter(config=tmp_path / "adapter"))
    with Engine(again) as engine:
        assert engine.evaluate([batch]).loss == trained


def test_an_adapter_of_parts_for_images_is_refused(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", FOR_TEXT["llava_next"])
    config = LoraConfig(r=2, target_modules=["q_proj"])  # of the text and of the vision tower
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's own
        get_peft_model(whole_model(base), config).save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(CheckpointError, match=r"vision_tower.*an adapter of a part for images"):
        open_checkpoint(base, adapter=Adapter(config=tmp_path / "adapter"))


def test_a_declaration_may_leave_the_parts_for_images_out(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", CONFIGS["llava"])
    left_out = ["model.vision_tower", "model.multi_modal_projector"]
    parts = {"embedding": ["model.language_model.embed_tokens"], "left_out": left_out}
    parts |= {"head": ["model.language_model.norm", "lm_head"]}
    declared = {"model_type": "llava", "blocks": "model.language_model.layers", **parts}
    (tmp_path / "text.json").write_text(json.dumps(declared))
    with Engine(open_checkpoint(base, architecture=tmp_path / "text.json")) as engine:
        names = [name for name, _ in engine.parameters_now()]
        engine.export(tmp_path / "out")
    assert not any(part in name for name in names for part in left_out)
    assert weights_of(tmp_path / "out").keys() == weights_of(base).keys()


def test_the_command_line_trains_the_text_of_such_a_model(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", FOR_TEXT["qwen3_5"])
    save_tokenizer(base)
    done("verify", "--model", base)
    done("convert", "--model", base, "--output", tmp_path / "int8", "--quantize", "int8")
    towers = {name for name in weights_of(base) if ".visual." in name}
    assert towers <= weights_of(tmp_path / "int8").keys()
