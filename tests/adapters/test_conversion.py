"""Checkpoints whose tensors transformers renames and joins as it loads them, and what else they
keep beside parameters.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import assert_equal, memory
from families import compare, small_config, small_model
from hypothesis import given
from hypothesis import strategies as st
from parity import assert_same_bits, assert_same_weights
from profiles import short_first
from runs import weights_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, Transpose, WeightConverter

from zo2adapters import generate, open_checkpoint
from zo2adapters.models import stored_tensors
from zo2adapters.models.conversion import quantize
from zo2adapters.trainers.verification import random_batch
from zo2core import (
    Engine,
    EngineOptions,
    MeZOSGD,
    ParameterSpec,
    WriteBackPolicy,
    ZerothOrder,
    ZO2Error,
)
from zo2core.checkpoint.export import write_checkpoint
from zo2core.checkpoint.shards import Piece, SafetensorsReader, TensorEntry, parse_header
from zo2core.errors import CheckpointError, JournalError, UnsupportedModelError
from zo2core.types import SavedForm, SavedPart

BIAS = "e_score_correction_bias"  # a buffer
CONVERTED = [
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
    "granitemoe",
    "gpt_neox",
    "olmo_hybrid",
    "apertus",
    "minimax_m2",
]
STREAMED = memory(2)


def tiny(model_type: str) -> Any:
    model: Any = small_model(small_config(model_type))
    for name, buffer in model.named_buffers():
        if name.endswith(BIAS):
            buffer.copy_(torch.linspace(-1.0, 1.0, buffer.numel()))
    return model


def saved(model_type: str, directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A tiny checkpoint as transformers writes it: in the form that the hub has."""
    tiny(model_type).to(dtype).save_pretrained(directory)
    return directory


@pytest.mark.few(3)
@pytest.mark.parametrize("model_type", CONVERTED)
# in bfloat16 more can differ
@pytest.mark.parametrize("dtype", short_first([torch.bfloat16], [torch.float32]))
def test_converted_checkpoints_are_monolithic_mezo(
    model_type: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    compared = compare(tiny(model_type), dtype, tmp_path / "model")
    assert compared["outcome"] == "equal", compared


@pytest.mark.parametrize("model_type", CONVERTED)
def test_an_export_has_the_tensors_of_its_base(model_type: str, tmp_path: Path) -> None:
    base = saved(model_type, tmp_path / "base", torch.bfloat16)
    with Engine(open_checkpoint(base)) as replayer:
        replayer.export(tmp_path / "out")
    before, after = weights_of(base), weights_of(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        # transformers loads some in float32 all the same
        assert_same_bits(name, after[name].float(), tensor.float())


LAYER = "model.layers.0."
Tensors = dict[str, torch.Tensor]
NEXT: dict[str, tuple[str, Tensors]] = {  # layers that predict further tokens, as released
    "deepseek_v3": ("model.layers.61.", {"embed_tokens.weight": torch.ones(4, 3)}),
    "glm4_moe": ("model.layers.92.", {"shared_head.norm.weight": torch.ones(4)}),
    "qwen3_next": ("mtp.layers.0.", {"fc.weight": torch.ones(4, 3).bfloat16()}),
    "llama": ("model.layers.0.self_attn.rotary_emb.", {"inv_freq": torch.ones(3)}),
}


def with_next_layer(model_type: str, directory: Path) -> Path:
    """A checkpoint with a layer that transformers ignores: a copy of the first one, and more."""
    base = saved(model_type, directory)
    prefix, more = NEXT[model_type]
    tensors = load_file(base / "model.safetensors")
    layer = {} if model_type == "llama" else tensors
    copies = {
        name.replace(LAYER, prefix): value + 1
        for name, value in layer.items()
        if name.startswith(LAYER)
    }
    others = {f"{prefix}{name}": value for name, value in more.items()}
    save_file({**tensors, **copies, **others}, base / "model.safetensors", {"format": "pt"})
    return base


@pytest.mark.parametrize("model_type", NEXT)
def test_layers_that_transformers_leaves_out_are_copied(model_type: str, tmp_path: Path) -> None:
    base = with_next_layer(model_type, tmp_path / "base")
    batch = random_batch(40, 2, 6, seed=0)
    with Engine(open_checkpoint(base), ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-2))) as engine:
        engine.step(batch)
        engine.export(tmp_path / "out")
    before, after = weights_of(base), weights_of(tmp_path / "out")
    copied = {name for name in before if name.startswith(NEXT[model_type][0])}
    assert len(copied) == (1 if model_type == "llama" else len(copied)) > 0
    assert before.keys() == after.keys()
    for name in copied:
        assert_same_bits(name, after[name], before[name])
    quantize(base, tmp_path / "int8", "int8")
    kept = weights_of(tmp_path / "int8")
    assert all(torch.equal(kept[name], before[name]) for name in copied)


def test_encoded_tensors_that_transformers_leaves_out_are_decoded_as_the_others(
    tmp_path: Path,
) -> None:
    base = saved("deepseek_v3", tmp_path / "base", torch.bfloat16)
    quantize(base, tmp_path / "fp8", "fp8")
    shard = tmp_path / "fp8" / "model.safetensors"
    tensors, own = load_file(shard), "layers.0.self_attn.o_proj."
    prefix = NEXT["deepseek_v3"][0]
    further = {
        name.replace("model.layers.0.", prefix): value.clone()
        for name, value in tensors.items()
        if own in name
    }
    assert len(further) == 2
    save_file({**tensors, **further}, shard, {"format": "pt"})
    with Engine(open_checkpoint(tmp_path / "fp8")) as replayer:
        replayer.export(tmp_path / "out")
    after = weights_of(tmp_path / "out")
    [name] = [name for name in after if name.startswith(prefix)]
    assert after[name].dtype is torch.bfloat16
    assert_same_bits(name, after[name], after[name.replace(prefix, "model.layers.0.")])


def test_generation_with_a_cache_of_the_models_own_is_refused_by_name(tmp_path: Path) -> None:
    model = open_checkpoint(saved("minimax", tmp_path / "base"))
    with (
        Engine(model) as replayer,
        pytest.raises(UnsupportedModelError, match=r"minimax.*DynamicCache"),
    ):
        next(generate(replayer, model, [[3, 5]], max_new_tokens=1))


def test_a_streamed_run_of_pieces_reads_what_from_pretrained_loads_and_goes_on(
    tmp_path: Path,
) -> None:
    base = saved("mixtral", tmp_path / "base")
    batch, method = random_batch(40, 2, 6, seed=0), ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-2))
    stock = dict(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).named_parameters())
    with Engine(open_checkpoint(base), memory=STREAMED) as replayer:
        assert_same_weights(replayer.parameters_now(), stock.items())

    def run(directory: Path, steps: int) -> list[float]:
        directory.mkdir(exist_ok=True)
        with Engine(
            open_checkpoint(base),
            method,
            journal=directory / "journal.jsonl",
            memory=STREAMED,
            options=EngineOptions(write_back=WriteBackPolicy(directory=directory)),
        ) as engine:
            return [engine.step(batch).loss for _ in range(steps)]

    straight = run(tmp_path / "straight", 4)
    assert [*run(tmp_path / "cut", 2), *run(tmp_path / "cut", 2)] == straight


def changed(base: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Replace tensors of a checkpoint, or leave them out."""
    tensors = {**weights_of(base), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, base / "model.safetensors", metadata={"format": "pt"})


GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"
EXPERT = "model.layers.0.block_sparse_moe.experts.1.w1.weight"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({EXPERT: None}, "do not fit together|of shape"),
        ({EXPERT: torch.zeros(3, 16)}, "do not fit together"),
        ({EXPERT.replace("w1", "w2"): torch.zeros(16, 31)}, r"tensor\(s\), the first of shape"),
        ({EXPERT: torch.zeros(32, 16, dtype=torch.float64)}, "dtype F64"),
        (
            {EXPERT.replace("w1", "w9"): torch.zeros(32, 16)},
            "w9.*that the model of config.json does not have",
        ),
        ({"model.layers.0.mlp.gate.weight": torch.zeros(4, 16)}, "a second tensor for"),
        ({GATE_UP: torch.zeros(4, 64, 16)}, f"a second tensor for {re.escape(GATE_UP)}"),
    ],
)
def test_experts_that_do_not_fit_are_refused(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    base = saved("mixtral", tmp_path / "base")
    changed(base, changes)
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(base)


def test_a_rule_that_moves_more_than_rows_or_computes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Doubled(Concatenate):
        """Not one of those that are known to move rows only."""

    base = saved("llama", tmp_path / "base")
    both, moved = ["gate_proj.weight", "up_proj.weight"], r"makes columns of \({}\); expected"
    rules: list[tuple[WeightConverter, type[ZO2Error], str]] = [
        (
            WeightConverter("up_proj.weight", "up_proj.weight", [Transpose(0, 1)]),
            UnsupportedModelError,
            moved.format("Transpose"),
        ),
        (
            WeightConverter(both, "gate_proj.weight", [Concatenate(dim=1)]),
            UnsupportedModelError,
            moved.format("Concatenate"),
        ),
        (
            WeightConverter("up_proj.weight", "up_proj.weight", [Doubled()]),
            UnsupportedModelError,
            r"Doubled.*up_proj",
        ),
    ]
    for rule, error, told in rules:
        monkeypatch.setattr(
            stored_tensors, "get_model_conversion_mapping", lambda model, rule=rule: [rule]
        )
        with pytest.raises(error, match=told):
            open_checkpoint(base)


def test_a_tensor_that_has_the_models_shape_already_is_not_transposed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = saved("llama", tmp_path / "base")
    before = weights_of(base)
    transposition: Any = Transpose(0, 1)
    transposition.check_dims = True  # as of Qwen3-VL's experts
    rule = WeightConverter("up_proj.weight", "up_proj.weight", [transposition])
    monkeypatch.setattr(stored_tensors, "get_model_conversion_mapping", lambda model: [rule])
    with Engine(open_checkpoint(base)) as engine:
        assert_equal(dict(engine.parameters_now()), before)


def test_buffers_decide_the_result_and_so_the_journal_knows_them(tmp_path: Path) -> None:
    base = saved("deepseek_v3", tmp_path / "base")
    batch, estimator = random_batch(40, 2, 6, seed=0), MeZOSGD(lr=1e-2, zo_eps=1e-2)
    with Engine(
        open_checkpoint(base), ZerothOrder(estimator), journal=tmp_path / "journal.jsonl"
    ) as engine:
        engine.step(batch)
    [name] = [name for name in weights_of(base) if name.endswith(BIAS)]
    changed(base, {name: weights_of(base)[name] + 1})
    with pytest.raises(JournalError, match="buffers"):
        Engine(open_checkpoint(base), ZerothOrder(estimator), journal=tmp_path / "journal.jsonl")
    changed(base, {name: None})
    with pytest.raises(CheckpointError, match=r"no tensor.*e_score_correction_bias"):
        open_checkpoint(base)


def test_a_tied_tensor_is_found_under_any_of_its_names(tmp_path: Path) -> None:
    base = saved("llama", tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    table = weights_of(base)["model.embed_tokens.weight"]
    changed(base, {"model.embed_tokens.weight": None, "lm_head.weight": table})
    with Engine(open_checkpoint(base)) as replayer:
        values = dict(replayer.parameters_now())
        replayer.export(tmp_path / "out")
    assert_same_bits("table", values["model.embed_tokens.weight"], table)
    assert "lm_head.weight" in weights_of(tmp_path / "out")


@given(data=st.data())
def test_any_range_of_a_parameter_of_pieces_is_read(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    sizes = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=4))
    held = {
        f"t{i}": torch.arange(size, dtype=torch.float32) + 100 * i for i, size in enumerate(sizes)
    }
    save_file(held, folder / "model.safetensors")
    entries = parse_header(folder / "model.safetensors")
    pieces = []
    for _ in range(data.draw(st.integers(1, 6))):
        name = data.draw(st.sampled_from(sorted(held)))
        start = data.draw(st.integers(0, held[name].numel() - 1))
        pieces.append(
            Piece(entries[name], start, data.draw(st.integers(1, held[name].numel() - start)))
        )
    whole = torch.cat([held[entry.name][start : start + numel] for entry, start, numel in pieces])
    first = data.draw(st.integers(0, whole.numel()))
    out = torch.full((data.draw(st.integers(0, whole.numel() - first)),), -1.0)
    reader = SafetensorsReader({"p": pieces})
    reader.read_into("p", out, first)
    reader.close()
    assert torch.equal(out, whole[first : first + out.numel()])


def test_parameters_fill_the_tensors_of_a_saved_form_together(tmp_path: Path) -> None:
    specs = [
        ParameterSpec(name, (4, 3), torch.float32, index, decays=True)
        for index, name in enumerate("ab")
    ]
    values = {name: torch.arange(12.0).view(4, 3) + 100 * index for index, name in enumerate("ab")}
    # a is the second one
    halves = {"a": [SavedPart("x", (8, 3), 12, 12)], "b": [SavedPart("x", (8, 3), 0, 12)]}
    form = SavedForm(parts=halves, constants={"count": torch.tensor([1, 2, 3])})
    for max_shard in (1, 1 << 20):
        out = tmp_path / str(max_shard)
        write_checkpoint(
            out, specs, values.items(), {}, dtype=torch.bfloat16, form=form, max_shard=max_shard
        )
        held: dict[str, torch.Tensor] = {}
        for file in out.glob("*.safetensors"):
            held |= load_file(file)
        assert held.keys() == {"x", "count"}
        assert torch.equal(held["x"], torch.cat([values["b"], values["a"]]).bfloat16())
        assert torch.equal(held["count"], torch.tensor([1, 2, 3]))


def test_a_range_beyond_a_parameter_and_a_tensor_that_does_not_come_leave_no_hole(
    tmp_path: Path,
) -> None:
    save_file({"t": torch.arange(8.0)}, tmp_path / "model.safetensors")
    reader = SafetensorsReader(parse_header(tmp_path / "model.safetensors"))
    with pytest.raises(AssertionError, match="ends at element 8"):
        reader.read_into("t", torch.empty(4), 6)
    entry = parse_header(tmp_path / "model.safetensors")["t"]
    halves = Piece(entry, 0, 4), Piece(entry, 4, 4)
    places: list[TensorEntry | list[Piece]] = [entry, [*halves], [*reversed(halves)], [halves[0]]]
    fingerprints = {SafetensorsReader({"p": place}).fingerprint for place in places}
    assert len(fingerprints) == len(places), "a fingerprint tells which rows make up a parameter"
    specs = [
        ParameterSpec(name, (4,), torch.float32, index, decays=True)
        for index, name in enumerate("ab")
    ]
    with pytest.raises(AssertionError, match="b"):
        write_checkpoint(tmp_path / "out", specs, [("a", torch.zeros(4))], {})
    assert not (tmp_path / "out").exists()


def test_buffers_of_a_checkpoint_without_the_models_prefix_are_read_and_exported(
    tmp_path: Path,
) -> None:
    base = saved("deepseek_v3", tmp_path / "base")
    bare = {name.removeprefix("model."): tensor for name, tensor in weights_of(base).items()}
    save_file(bare, base / "model.safetensors", metadata={"format": "pt"})
    with Engine(open_checkpoint(base)) as replayer:
        replayer.export(tmp_path / "out")
    stock, expected = (
        AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (tmp_path / "out", base)
    )
    assert_equal(stock, expected)
    assert any(bool(tensor.any()) for name, tensor in stock.items() if name.endswith(BIAS))


def test_a_buffer_that_is_made_of_several_tensors_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = saved("deepseek_v3", tmp_path / "base")
    rules = get_model_conversion_mapping(small_model(small_config("deepseek_v3")))
    joined = WeightConverter(["half_a", "half_b"], "e_score_correction_bias", [Concatenate(dim=0)])
    [name] = [name for name in weights_of(base) if name.endswith(BIAS)]
    halves = {name.replace(BIAS, half): torch.zeros(2) for half in ("half_a", "half_b")}
    changed(base, {name: None, **halves})
    monkeypatch.setattr(
        stored_tensors, "get_model_conversion_mapping", lambda model: [*rules, joined]
    )
    with pytest.raises(
        UnsupportedModelError, match=r"a part of the buffer .*e_score_correction_bias"
    ):
        open_checkpoint(base)
