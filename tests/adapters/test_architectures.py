"""How models are cut, which checkpoints are taken and which are refused, and architectures that
nobody declared.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_lines import make_place, refusal, run_here
from engines import memory, zeroth_order
from families import compare, small_config, small_model, stock_scores, stock_tokens
from models import (
    BLOOM,
    BLOOM_CONFIG,
    CONFIGS,
    WORDS,
    make_batch,
    random_model,
    save_model,
    save_tokenizer,
)
from models import small_config as known_config
from parity import assert_same_bits, assert_steps_alike
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedModel

from zo2adapters import Adapter, Architecture, MonolithicMeZO, open_checkpoint
from zo2adapters.models.architecture import ARCHITECTURES, derive_architecture, segment_layouts
from zo2adapters.models.skeleton import build_skeleton
from zo2adapters.tasks.generation import generate
from zo2adapters.tasks.objectives import score
from zo2adapters.trainers.verification import random_batch
from zo2core import (
    Engine,
    LowRankPerturbation,
    MeZOSGD,
    MultiQueryRGE,
    PerRowRGE,
    ZerothOrder,
    ZO2Error,
)
from zo2core.errors import CheckpointError, OptionError, UnsupportedModelError, ZO2Warning

MODEL = "model.safetensors"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_model(tmp_path / "base", known_config("opt"))


def rewrite(
    directory: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    save_file(change(load_file(directory / MODEL)), directory / MODEL)


def edit_config(directory: Path, **changes: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("model_type", CONFIGS)
def test_every_parameter_is_in_one_segment_and_a_skeleton_holds_real_buffers_alone(
    model_type: str,
) -> None:
    skeleton = build_skeleton(known_config(model_type), torch.float32)
    layouts = segment_layouts(skeleton, ARCHITECTURES[model_type])
    specs = [spec for layout in layouts for spec in layout.parameters]
    assert sorted(spec.name for spec in specs) == sorted(
        name for name, _ in skeleton.named_parameters()
    )
    assert [name for name, _ in skeleton.named_parameters()] == [
        s.name for s in sorted(specs, key=lambda s: s.index)
    ]
    assert [layout.kind.value for layout in layouts] == ["embedding", "block", "block", "head"]
    skeleton = build_skeleton(
        known_config(model_type, hidden_size=1200, num_attention_heads=3), torch.float32
    )
    assert all(p.is_meta for p in skeleton.parameters() if p.dim() > 1)
    assert not any(buffer.is_meta for buffer in skeleton.buffers())
    whole = random_model(skeleton.config)
    for ours, theirs in zip(skeleton.buffers(), whole.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_tied_weight_is_the_embeddings_and_decay_goes_by_mezos_rule() -> None:
    def layouts_of(model_type: str, **changes: Any) -> Any:
        skeleton = build_skeleton(known_config(model_type, **changes), torch.float32)
        return segment_layouts(skeleton, ARCHITECTURES[model_type])

    for tied in (True, False):
        head = layouts_of("opt", tie_word_embeddings=tied)[-1]
        assert [spec.name for spec in head.borrowed] == (
            ["model.decoder.embed_tokens.weight"] if tied else []
        )
        assert ("lm_head.weight" in [spec.name for spec in head.parameters]) == (not tied)
    decays = {
        spec.name: spec.decays for layout in layouts_of("qwen3") for spec in layout.parameters
    }
    assert decays["model.norm.weight"]
    assert decays["model.layers.0.self_attn.q_norm.weight"]
    assert not decays["model.layers.0.input_layernorm.weight"]
    block = layouts_of("opt")[1]
    assert not any(
        spec.decays for spec in block.parameters if "bias" in spec.name or "layer_norm" in spec.name
    )


def test_opt_checkpoints_load_with_either_prefix_and_with_a_copy_of_the_tied_head(
    base: Path, tmp_path: Path
) -> None:
    def first_loss(directory: Path) -> float:
        with Engine(
            open_checkpoint(directory), ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3))
        ) as engine:
            return engine.step(make_batch(40, [6]), seed=1).loss

    expected = first_loss(base)
    short = shutil.copytree(base, tmp_path / "short")
    rewrite(
        short,
        lambda tensors: {name.removeprefix("model."): value for name, value in tensors.items()},
    )
    assert "decoder.embed_tokens.weight" in load_file(short / MODEL)
    assert first_loss(short) == expected
    table = "model.decoder.embed_tokens.weight"
    double = shutil.copytree(base, tmp_path / "double")
    rewrite(double, lambda tensors: {**tensors, "lm_head.weight": tensors[table].clone()})
    assert first_loss(double) == expected
    rewrite(double, lambda tensors: {**tensors, "lm_head.weight": tensors[table] + 1})
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        open_checkpoint(double)
    # a name that only old checkpoints carry is left out
    llama = save_model(tmp_path / "llama", known_config("llama"))
    rewrite(
        llama,
        lambda tensors: {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)},
    )
    open_checkpoint(llama)


REFUSED: dict[str, tuple[Callable[[Path], object], type[ZO2Error], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), CheckpointError, "config.json"),
    "config not JSON": (lambda d: (d / "config.json").write_text("{"), CheckpointError, "config"),
    "another architecture": (
        lambda d: edit_config(d, model_type="gpt2"),
        CheckpointError,
        "does not have",
    ),
    "no causal language model": (
        lambda d: edit_config(d, model_type="t5"),
        UnsupportedModelError,
        "causal",
    ),
    "layers that cannot be cut apart": (
        lambda d: edit_config(d, model_type="rwkv"),
        UnsupportedModelError,
        "Architecture",
    ),
    "unknown to transformers": (
        lambda d: edit_config(d, model_type="nobody"),
        UnsupportedModelError,
        "remote code",
    ),
    "quantised by config": (
        lambda d: edit_config(d, quantization_config={"quant_method": "quip", "bits": 2}),
        UnsupportedModelError,
        "unquantised",
    ),
    "quantised tensor": (
        lambda d: rewrite(
            d,
            lambda t: {
                **t,
                "model.decoder.layers.0.fc1.weight": torch.zeros(20, 12, dtype=torch.int8),
            },
        ),
        CheckpointError,
        "unquantised",
    ),
    "pickled": (
        lambda d: (d / MODEL).rename(d / "pytorch_model.bin"),
        UnsupportedModelError,
        "zo2 convert",
    ),
    "no weights": (lambda d: (d / MODEL).unlink(), CheckpointError, "no safetensors"),
    "truncated": (
        lambda d: (d / MODEL).write_bytes((d / MODEL).read_bytes()[:-1]),
        CheckpointError,
        "not fully covered",
    ),
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
        lambda d: rewrite(
            d,
            lambda t: {**t, "model.decoder.layers.0.fc1.bias": torch.ones(20, dtype=torch.float16)},
        ),
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


def test_unknown_dtypes_and_paths_that_are_nothing_are_refused(base: Path) -> None:
    dtypes: list[str | torch.dtype] = ["int8", "half", torch.int32, torch.float8_e4m3fn]
    for dtype in dtypes:
        with pytest.raises(OptionError, match="dtype"):
            open_checkpoint(base, dtype=dtype)
    for path in ("./nowhere", "/nowhere/at/all", "a/b/c", "no-such/model"):
        with pytest.raises(CheckpointError, match="directory"):
            open_checkpoint(path)


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


def test_an_incomplete_declaration_is_refused_and_layers_that_return_tuples_need_only_say_so(
    tmp_path: Path,
) -> None:
    base = save_model(
        tmp_path / "base",
        MistralConfig(**known_config("llama").to_diff_dict() | {"model_type": "mistral"}),
    )
    forgot_norm = Architecture(
        model_type="mistral",
        embedding=("model.embed_tokens",),
        blocks="model.layers",
        head=("lm_head",),
    )
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight"):
        open_checkpoint(base, architecture=forgot_norm)
    base, batch = save_model(tmp_path / "bloom", BLOOM_CONFIG), make_batch(40, [7, 4])
    with Engine(
        open_checkpoint(base, architecture=BLOOM), ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3))
    ) as engine:
        assert (
            engine.evaluate([batch]).loss
            == AutoModelForCausalLM.from_pretrained(base)(**batch).loss.item()
        )


def test_exports_keep_config_and_companions(base: Path, tmp_path: Path) -> None:
    edit_config(base, torch_dtype="float32", extra_key=7)
    (base / "tokenizer_config.json").write_text('{"mine": 1}')
    (base / "notes.md").write_text("not part of a model")
    with Engine(
        open_checkpoint(base, dtype="bfloat16"), ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3))
    ) as engine:
        engine.export(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["extra_key"] == 7
    assert config["architectures"] == ["OPTForCausalLM"]
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == '{"mine": 1}'
    assert not (tmp_path / "out" / "notes.md").exists()
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype is torch.bfloat16
    )


# An architecture that nobody declared: its parts are learned from a dry run, or it is refused by
# name


UNDECLARED = [
    "mistral",
    "gpt2",
    "bloom",
    "phi",
    "gemma2",
    "gpt_bigcode",
    "gptj",
    "codegen",
    "openai-gpt",
    "olmo2",
]
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
    if is_short and dtype is torch.float32 and model_type != "recurrent_gemma":
        # whose last bit depends on the kernel
        pytest.skip("in bfloat16 more can differ; float32 is for the long profile")
    config = small_config(model_type)
    compared = compare(small_model(config), dtype, tmp_path / "model")
    assert compared["outcome"] == "equal", compared


@pytest.mark.few(2)
@pytest.mark.parametrize("precision", ["exact", "mixed"])
@pytest.mark.parametrize("buckets", [None, 1], ids=["resident", "streamed"])
def test_what_layers_share_is_the_embeddings_and_they_borrow_it(
    tmp_path: Path, precision: str, buckets: int | None
) -> None:
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
    batch = random_batch(40, 2, 6, seed=0)
    with zeroth_order(model, MeZOSGD(**numbers), memory=memory(buckets)) as engine:
        assert_steps_alike(engine, literal, [batch] * 3)


@pytest.mark.parametrize("model_type", ["codegen", "gpt_neo"])
def test_tables_that_no_checkpoint_holds_are_transformers_and_no_keys_are_cached(
    model_type: str, tmp_path: Path
) -> None:
    """CodeGen rounds the keys that it caches; neither the engine nor the loop that it is held
    against caches any.
    """
    config = small_config(model_type)
    made: Any = small_model(config)
    made.to(torch.bfloat16).save_pretrained(tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ours, tables = (
        dict(build_skeleton(config, torch.bfloat16).named_buffers()),
        dict(whole.named_buffers()),
    )
    assert tables or model_type != "codegen"
    for name, table in tables.items():
        assert_same_bits(name, ours[name], table)
    assert whole.config.use_cache
    literal = MonolithicMeZO(whole, lr=1e-2, zo_eps=1e-2)
    batch = random_batch(40, 2, 6, seed=0)
    with Engine(open_checkpoint(tmp_path), ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-2))) as engine:
        assert_steps_alike(engine, literal, [batch] * 3)
    assert whole.config.use_cache, "the config is the caller's"


def test_a_dry_run_leaves_the_model_and_weights_that_transformers_overwrites_are_refused() -> None:
    skeleton = build_skeleton(known_config("llama"), torch.float32)

    def state(model: PreTrainedModel) -> list[Any]:
        tensors = [
            (name, id(tensor))
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        ]
        return [
            tensors,
            [
                (name, id(module), len(module._forward_pre_hooks))
                for name, module in model.named_modules()
            ],
        ]

    before = state(skeleton)
    assert derive_architecture(skeleton).axes == ARCHITECTURES["llama"].axes == (0, 1), (
        "rows and tokens come first"
    )
    assert state(skeleton) == before
    with pytest.raises(UnsupportedModelError, match=r"model.embed_tokens: .*overwrites.*zero_"):
        build_skeleton(small_config("youtu"), torch.float32)


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

    def forward(
        self, input_ids: torch.Tensor, use_cache: bool, labels: torch.Tensor | None = None
    ) -> SimpleNamespace:
        if self.how == "longer rows" and input_ids.shape[1] == 1:
            raise IndexError("one token is too short")
        hidden, other = self.table(input_ids), None
        embedded, past = hidden, []
        if self.how == "before and after":
            hidden = self.extra(hidden)
        for index, layer in enumerate(
            reversed(self.layers) if self.how == "reversed" else self.layers
        ):
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


# Hidden states with an axis beside rows, tokens and hidden size: before them in Gemma 3n, behind
# tokens in DeepSeek-V4


COPIES = 4  # vectors of the hidden size that each token has in both models
AXES = {"gemma3n_text": (1, 2), "deepseek_v4": (0, 1)}
MEZO = MeZOSGD(lr=1e-2, zo_eps=1e-2)
# As many rows as copies, and as many tokens: sizes alone do not tell the axes.
SQUARE = make_batch(40, [COPIES] * COPIES)


@pytest.fixture(params=AXES)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint of each model."""
    small_model(small_config(request.param)).save_pretrained(tmp_path / request.param)
    return tmp_path / str(request.param)


def whole_model(checkpoint: Path) -> Any:
    whole = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    whole.config.use_cache = False
    return whole


def test_axes_of_rows_and_tokens_are_learned_and_passed_tensors_may_be_asked_for_a_dtype() -> None:
    for model_type, axes in AXES.items():
        assert (
            derive_architecture(build_skeleton(small_config(model_type), torch.float32)).axes
            == axes
        )
    model: Any = _Odd("kept as it is")
    assert derive_architecture(model).embedding == ("table",)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "prompts", [[[7, 3, 11, 20]], [[7, 3, 11, 20], [5, 9]], [[3, 4, 5, 6]] * COPIES], ids=len
)
def test_greedy_tokens_are_hugging_faces(checkpoint: Path, prompts: list[list[int]]) -> None:
    model = open_checkpoint(checkpoint)
    with Engine(model) as replayer:
        steps = list(generate(replayer, model, prompts, max_new_tokens=12))
    assert [list(row) for row in zip(*steps, strict=True)] == stock_tokens(
        whole_model(checkpoint), prompts
    )


@pytest.mark.parametrize("chunk", [None, 3])
def test_log_likelihoods_are_the_whole_models(checkpoint: Path, chunk: int | None) -> None:
    prompts, candidates = [[7, 3, 11, 20], [5, 9]], [[[4], [6, 8]], [[10, 12, 13], [14]]]
    model = open_checkpoint(checkpoint, loss_chunk=chunk)
    with Engine(model) as replayer:
        scored = score(replayer, model, prompts, candidates).log_likelihoods
    assert sum(scored, ()) == pytest.approx(stock_scores(whole_model(checkpoint)), rel=1e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize("rows", [None, 1])
def test_losses_in_chunks_and_micro_batches_are_the_whole_models(
    checkpoint: Path, rows: int | None
) -> None:
    """And a direction of each row takes them along their axis."""
    whole = whole_model(checkpoint)
    for batch in (SQUARE, make_batch(40, [9, 4])):
        with torch.inference_mode():
            expected = float(whole(**batch).loss)
        with Engine(open_checkpoint(checkpoint, loss_chunk=3), micro_batch_size=rows) as replayer:
            assert replayer.evaluate([batch]).loss == pytest.approx(expected, rel=1e-5)
    losses, method = [], ZerothOrder(PerRowRGE(lr=1e-2, zo_eps=1e-2, q=COPIES))
    for chunk in (None, 3):
        with Engine(open_checkpoint(checkpoint, loss_chunk=chunk), method) as engine:
            losses.append(engine.step(SQUARE, seed=0).losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_mixed_precision_is_monolithic_mezo_under_autocast(checkpoint: Path) -> None:
    model = open_checkpoint(checkpoint, precision="mixed", dtype="bfloat16", loss_chunk=None)
    literal = MonolithicMeZO(whole_model(checkpoint), lr=1e-2, zo_eps=1e-2, autocast=torch.bfloat16)
    with Engine(model, ZerothOrder(MEZO)) as engine:
        assert_steps_alike(engine, literal, [SQUARE] * 2)
        first = engine.journal.updates[0]
    with Engine(
        open_checkpoint(checkpoint, precision="mixed", dtype="bfloat16"), ZerothOrder(MEZO)
    ) as engine:
        # In chunks, as a run has it.
        assert engine.step(SQUARE, seed=first.seeds[0]).losses == pytest.approx(
            first.losses, rel=1e-2
        )


@pytest.mark.long_profile
def test_directions_of_low_rank_are_right_or_refused_by_name(tmp_path: Path) -> None:
    estimator = MultiQueryRGE(lr=1e-2, zo_eps=1e-2, q=2, perturb_in_place=False)
    for name in AXES:
        small_model(small_config(name)).save_pretrained(tmp_path / name)

    def losses(name: str, chunk: int | None, stack: int | None) -> tuple[float, ...]:
        model = open_checkpoint(tmp_path / name, loss_chunk=chunk)
        with Engine(
            model, ZerothOrder(estimator, perturbation=LowRankPerturbation(rank=2, stack=stack))
        ) as engine:
            return engine.step(SQUARE, seed=0).losses

    one_by_one = losses("gemma3n_text", None, 1)
    assert len(set(one_by_one)) == 4
    for chunk, stack in ((None, None), (3, None), (3, 1)):
        assert losses("gemma3n_text", chunk, stack) == pytest.approx(one_by_one, rel=1e-5)
    with pytest.raises(UnsupportedModelError, match=r"^model\.layers\.0\..*beside the activations"):
        losses("deepseek_v4", None, None)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft asks for it
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")  # peft's own call
def test_a_prefix_is_pefts_and_its_first_values_are_refused_where_layers_share_keys(
    tmp_path: Path,
) -> None:
    peft: Any = pytest.importorskip("peft")
    small_model(small_config("gemma3n_text")).save_pretrained(tmp_path / "base")
    learned = derive_architecture(build_skeleton(small_config("gemma3n_text"), torch.float32))
    wrong = open_checkpoint(tmp_path / "base", architecture=replace(learned, axes=(0, 1)))
    with (
        Engine(wrong) as replayer,
        pytest.raises(UnsupportedModelError, match="gemma3n_text: found hidden states"),
    ):
        replayer.evaluate([make_batch(40, [9, 4])])  # declared with the wrong axes
    options = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
    zeros = peft.PrefixTuningConfig(**options, init_weights="zero")
    whole = peft.get_peft_model(whole_model(tmp_path / "base"), zeros).eval()
    with torch.inference_mode():
        expected = float(whole(**SQUARE).loss)
    for chunk in (None, 3):
        with Engine(
            open_checkpoint(tmp_path / "base", adapter=Adapter(config=zeros), loss_chunk=chunk)
        ) as replayer:
            assert replayer.evaluate([SQUARE]).loss == pytest.approx(expected, rel=1e-5)
    real = open_checkpoint(
        tmp_path / "base", adapter=Adapter(config=peft.PrefixTuningConfig(**options))
    )
    with (
        pytest.raises(UnsupportedModelError, match="keys and values of 2 layers"),
        Engine(real) as replayer,
    ):
        replayer.evaluate([SQUARE])


# A declaration in a file: what every command that opens a model makes of it


DECLARED: dict[str, Any] = {
    "model_type": "mistral",
    "embedding": ["model.embed_tokens"],
    "blocks": "model.layers",
    "head": ["model.norm", "lm_head"],
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Rows, and a Mistral with a declaration beside it."""
    make_place(tmp_path)
    config = small_config("mistral")
    assert config.vocab_size >= len(WORDS)
    small_model(config).save_pretrained(tmp_path / "mistral")
    save_tokenizer(tmp_path / "mistral")
    (tmp_path / "mistral.json").write_text(json.dumps(DECLARED))
    return tmp_path


def test_a_declaration_in_a_file_is_what_is_derived_and_other_files_are_refused(
    place: Path,
) -> None:
    declared = open_checkpoint(place / "mistral", architecture=place / "mistral.json").layouts
    assert declared == open_checkpoint(place / "mistral").layouts
    derived = derive_architecture(
        build_skeleton(small_config("mistral"), declared[0].parameters[0].dtype)
    )
    (place / "derived.json").write_text(json.dumps(asdict(derived)))
    assert (
        open_checkpoint(place / "mistral", architecture=place / "derived.json").layouts == declared
    )
    for content in (b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000):
        (place / "wrong.json").write_bytes(content)
        with pytest.raises(OptionError, match=r"wrong\.json"):
            open_checkpoint(place / "mistral", architecture=place / "wrong.json")
    with pytest.raises(OptionError, match="readable"):
        open_checkpoint(place / "mistral", architecture=place / "nowhere.json")


def test_every_command_that_opens_a_model_takes_a_declaration_and_a_run_keeps_it(
    place: Path,
) -> None:
    model, data = (
        ("--model", place / "mistral", "--architecture", place / "mistral.json"),
        ("--data", place / "rows.jsonl"),
    )
    for command in (
        ("plan", "--method", "zeroth-order", *model, "--batch-size", 1, "--sequence-length", 8),
        ("verify", *model, "--steps", 1, "--tokens", 4),
        (
            "train",
            "--method",
            "zeroth-order",
            *model,
            *data,
            "--output",
            place / "run",
            "--steps",
            2,
        ),
        ("evaluate", *model, *data),
        ("generate", *model, "--prompt", "the cat", "--max-new-tokens", 1),
        (
            "tune",
            "--method",
            "zeroth-order",
            *model,
            *data,
            "--output",
            place / "tuned",
            "--forwards",
            40,
            "--learning-rates",
            1e-5,
            1e-4,
        ),
        ("evaluate", "--run", place / "run", *data),
        ("export", "--run", place / "run", "--output", place / "out"),
    ):
        ended = run_here(*command)
        assert ended.status == 0, (command, ended)
    assert "architecture: " in refusal(
        "evaluate", "--run", place / "run", "--architecture", place / "rows.jsonl", *data
    )
    (place / "mistral.json").write_text(json.dumps({**DECLARED, "ignored": ["nothing"]}))
    assert "mistral.json, with sha256" in refusal("train", "--resume", place / "run", "--steps", 3)
    (place / "mistral.json").unlink()
    assert "mistral.json" in refusal("export", "--run", place / "run", "--output", place / "none")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model_type": "llama"},
            "found a declaration of llama; expected a declaration of mistral",
        ),
        ({"model_type": None}, "model_type: found 'None'; expected a name"),
        ({"head": "lm_head"}, "head: found 'lm_head'; expected a list of names"),
        ({"returned": 4}, "returned: found '4'; expected an integer from 0 to 3"),
        ({"returned": True}, "returned: found 'True'"),
        (
            {"axes": [1, 1]},
            "axes: found '[1, 1]'; expected a list of two different integers from 0 to 7",
        ),
        ({"axes": [0, "1"]}, "axes: found"),
        ({"axes": [1, 2]}, "model type mistral: found hidden states of shape"),
        ({"extra": 1}, "found a field 'extra'"),
        ({"blocks": ...}, "found no 'blocks'"),
        ({"blocks": "model.nothing"}, "model.nothing"),
        ({"blocks": "model.norm"}, "model.norm"),
        ({"head": ["lm_head"]}, "model.norm.weight"),
    ],
)
def test_a_declaration_that_is_none_is_refused(
    changes: dict[str, Any], said: str, place: Path
) -> None:
    values = {name: value for name, value in {**DECLARED, **changes}.items() if value is not ...}
    (place / "wrong.json").write_text(json.dumps(values))
    model = ("--model", place / "mistral", "--architecture", place / "wrong.json")
    assert said in refusal("generate", *model, "--prompt", "the cat", "--max-new-tokens", 1)
