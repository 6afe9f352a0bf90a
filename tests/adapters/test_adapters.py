"""Adapters: how models are cut, which checkpoints are taken and which are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import BLOOM, BLOOM_CONFIG, CONFIGS, make_batch, random_model, save_model, small_config
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MistralConfig

from zo2adapters import Architecture, open_checkpoint
from zo2adapters.models.architecture import ARCHITECTURES, segment_layouts
from zo2adapters.models.skeleton import build_skeleton
from zo2core import Engine, MeZOSGD, ZerothOrder, ZO2Error
from zo2core.errors import CheckpointError, OptionError, UnsupportedModelError, ZO2Warning

MODEL = "model.safetensors"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_model(tmp_path / "base", small_config("opt"))


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(change(load_file(directory / MODEL)), directory / MODEL)


def edit_config(directory: Path, **changes: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("model_type", CONFIGS)
def test_every_parameter_is_in_one_segment_in_registration_order(model_type: str) -> None:
    skeleton = build_skeleton(small_config(model_type), torch.float32)
    layouts = segment_layouts(skeleton, ARCHITECTURES[model_type])
    specs = [spec for layout in layouts for spec in layout.parameters]
    assert sorted(spec.name for spec in specs) == sorted(name for name, _ in skeleton.named_parameters())
    assert [name for name, _ in skeleton.named_parameters()] == [s.name for s in sorted(specs, key=lambda s: s.index)]
    assert [layout.kind.value for layout in layouts] == ["embedding", "block", "block", "head"]


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_skeleton_holds_no_weights_but_real_buffers(model_type: str) -> None:
    skeleton = build_skeleton(small_config(model_type, hidden_size=1200, num_attention_heads=3), torch.float32)
    assert all(p.is_meta for p in skeleton.parameters() if p.dim() > 1)
    assert not any(buffer.is_meta for buffer in skeleton.buffers())
    whole = random_model(skeleton.config)
    for ours, theirs in zip(skeleton.buffers(), whole.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_tied_weight_is_the_embeddings_and_borrowed_by_the_head() -> None:
    for tied in (True, False):
        layouts = segment_layouts(
            build_skeleton(small_config("opt", tie_word_embeddings=tied), torch.float32), ARCHITECTURES["opt"]
        )
        assert [spec.name for spec in layouts[-1].borrowed] == (["model.decoder.embed_tokens.weight"] if tied else [])
        assert ("lm_head.weight" in [spec.name for spec in layouts[-1].parameters]) == (not tied)


def test_decay_goes_by_mezos_rule() -> None:
    layouts = segment_layouts(build_skeleton(small_config("qwen3"), torch.float32), ARCHITECTURES["qwen3"])
    decays = {spec.name: spec.decays for layout in layouts for spec in layout.parameters}
    assert decays["model.norm.weight"]
    assert decays["model.layers.0.self_attn.q_norm.weight"]
    assert not decays["model.layers.0.input_layernorm.weight"]
    layouts = segment_layouts(build_skeleton(small_config("opt"), torch.float32), ARCHITECTURES["opt"])
    assert not any(spec.decays for spec in layouts[1].parameters if "bias" in spec.name or "layer_norm" in spec.name)


def test_opt_checkpoints_load_with_either_prefix_and_with_a_copy_of_the_tied_head(base: Path, tmp_path: Path) -> None:
    def first_loss(directory: Path) -> float:
        with Engine(open_checkpoint(directory), ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3))) as engine:
            return engine.step(make_batch(40, [6]), seed=1).loss

    expected = first_loss(base)
    short = shutil.copytree(base, tmp_path / "short")
    rewrite(short, lambda tensors: {name.removeprefix("model."): value for name, value in tensors.items()})
    assert "decoder.embed_tokens.weight" in load_file(short / MODEL)
    assert first_loss(short) == expected
    table = "model.decoder.embed_tokens.weight"
    double = shutil.copytree(base, tmp_path / "double")
    rewrite(double, lambda tensors: {**tensors, "lm_head.weight": tensors[table].clone()})
    assert first_loss(double) == expected
    rewrite(double, lambda tensors: {**tensors, "lm_head.weight": tensors[table] + 1})
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        open_checkpoint(double)


def test_names_that_only_old_checkpoints_carry_are_left_out(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama"))
    rewrite(base, lambda tensors: {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    open_checkpoint(base)


REFUSED: dict[str, tuple[Callable[[Path], object], type[ZO2Error], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), CheckpointError, "config.json"),
    "config not JSON": (lambda d: (d / "config.json").write_text("{"), CheckpointError, "config"),
    "another architecture": (lambda d: edit_config(d, model_type="gpt2"), CheckpointError, "does not have"),
    "no causal language model": (lambda d: edit_config(d, model_type="t5"), UnsupportedModelError, "causal"),
    "layers that cannot be cut apart": (lambda d: edit_config(d, model_type="rwkv"), UnsupportedModelError, "Architecture"),
    "unknown to transformers": (lambda d: edit_config(d, model_type="nobody"), UnsupportedModelError, "remote code"),
    "quantised by config": (
        lambda d: edit_config(d, quantization_config={"quant_method": "quip", "bits": 2}),
        UnsupportedModelError,
        "unquantised",
    ),
    "quantised tensor": (
        lambda d: rewrite(d, lambda t: {**t, "model.decoder.layers.0.fc1.weight": torch.zeros(20, 12, dtype=torch.int8)}),
        CheckpointError,
        "unquantised",
    ),
    "pickled": (lambda d: (d / MODEL).rename(d / "pytorch_model.bin"), UnsupportedModelError, "zo2 convert"),
    "no weights": (lambda d: (d / MODEL).unlink(), CheckpointError, "no safetensors"),
    "truncated": (lambda d: (d / MODEL).write_bytes((d / MODEL).read_bytes()[:-1]), CheckpointError, "not fully covered"),
    "tensor missing": (
        lambda d: rewrite(d, lambda t: {k: v for k, v in t.items() if not k.endswith("fc2.bias")}),
        CheckpointError,
        "no tensor model.decoder.layers.0.fc2.bias",
    ),
    "tensor unexpected": (
        lambda d: rewrite(d, lambda t: {**t, "model.decoder.layers.2.fc2.bias": torch.ones(12)}),
        CheckpointError,
        r"layers\.2\.fc2\.bias",
    ),
    "shape": (lambda d: edit_config(d, ffn_dim=24), CheckpointError, r"found shape \[20"),
    "dtype": (
        lambda d: rewrite(d, lambda t: {**t, "model.decoder.layers.0.fc1.bias": torch.ones(20, dtype=torch.float16)}),
        CheckpointError,
        "dtype F16",
    ),
}


@pytest.mark.parametrize(("damage", "kind", "words"), REFUSED.values(), ids=REFUSED)
def test_checkpoints_that_cannot_be_trained_are_refused(
    base: Path, damage: Callable[[Path], object], kind: type[ZO2Error], words: str
) -> None:
    damage(base)
    with pytest.raises(kind, match=words):
        open_checkpoint(base)


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "a/b/c", "no-such/model"])
def test_a_path_that_is_nothing_is_refused(path: str) -> None:
    with pytest.raises(CheckpointError, match="directory"):
        open_checkpoint(path)


@pytest.mark.parametrize("dtype", ["int8", "half", torch.int32, torch.float8_e4m3fn])
def test_unknown_dtypes_are_refused(base: Path, dtype: str | torch.dtype) -> None:
    with pytest.raises(OptionError, match="dtype"):
        open_checkpoint(base, dtype=dtype)


def test_remote_code_is_never_run(base: Path, tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    (base / "evil.py").write_text(f"open({str(witness)!r}, 'w')\nclass Evil: ...\n")
    edit_config(base, auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"})
    with pytest.warns(ZO2Warning, match="auto_map"):
        open_checkpoint(base)
    edit_config(base, model_type="evil")
    with pytest.raises(UnsupportedModelError):
        open_checkpoint(base)
    assert not witness.exists()


def test_an_incomplete_declaration_is_refused(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", MistralConfig(**small_config("llama").to_diff_dict() | {"model_type": "mistral"}))
    forgot_norm = Architecture(
        model_type="mistral", embedding=("model.embed_tokens",), blocks="model.layers", head=("lm_head",)
    )
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight"):
        open_checkpoint(base, architecture=forgot_norm)


def test_layers_that_return_tuples_need_only_say_so(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", BLOOM_CONFIG)
    whole = AutoModelForCausalLM.from_pretrained(base)
    batch = make_batch(40, [7, 4])
    with Engine(open_checkpoint(base, architecture=BLOOM), ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3))) as engine:
        assert engine.evaluate([batch]).loss == whole(**batch).loss.item()


def test_exports_keep_config_and_companions(base: Path, tmp_path: Path) -> None:
    edit_config(base, torch_dtype="float32", extra_key=7)
    (base / "tokenizer_config.json").write_text('{"mine": 1}')
    (base / "notes.md").write_text("not part of a model")
    with Engine(open_checkpoint(base, dtype="bfloat16"), ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3))) as engine:
        engine.export(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["extra_key"] == 7
    assert config["architectures"] == ["OPTForCausalLM"]
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == '{"mine": 1}'
    assert not (tmp_path / "out" / "notes.md").exists()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype is torch.bfloat16
