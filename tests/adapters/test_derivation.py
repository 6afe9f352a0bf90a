"""An architecture that nobody declared: its parts are learned from a dry run, or it is refused by name."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_lines import make_place, refusal, run_here
from engines import memory, zeroth_order
from families import compare, small_config, small_model, stock_scores, stock_tokens
from models import CONFIGS, WORDS, make_batch, save_tokenizer
from models import small_config as known_config
from parity import assert_same_bits, assert_steps_alike
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from zo2adapters import Adapter, MonolithicMeZO, open_checkpoint
from zo2adapters.models.architecture import ARCHITECTURES, derive_architecture
from zo2adapters.models.skeleton import build_skeleton
from zo2adapters.tasks.generation import generate
from zo2adapters.tasks.objectives import score
from zo2adapters.trainers.verification import random_batch
from zo2core import Engine, LowRankPerturbation, MeZOSGD, MultiQueryRGE, PerRowRGE, ZerothOrder
from zo2core.errors import OptionError, UnsupportedModelError

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
    batch = random_batch(40, 2, 6, seed=0)
    with zeroth_order(model, MeZOSGD(**numbers), memory=memory(buckets)) as engine:
        assert_steps_alike(engine, literal, [batch] * 3)


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
        assert_steps_alike(engine, literal, [batch] * 3)
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


# Hidden states with an axis beside rows, tokens and hidden size: before them in Gemma 3n, behind tokens in DeepSeek-V4


COPIES = 4  # vectors of the hidden size that each token has in both models
AXES = {"gemma3n_text": (1, 2), "deepseek_v4": (0, 1)}
MEZO = MeZOSGD(lr=1e-2, zo_eps=1e-2)
# As many rows as copies, and as many tokens: sizes alone do not tell the axes.
SQUARE = make_batch(40, [COPIES] * COPIES)


@pytest.fixture(params=AXES)
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint of each model."""
    small_model(small_config(request.param)).save_pretrained(tmp_path / request.param)
    return tmp_path / str(request.param)


def whole_model(base: Path) -> Any:
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    whole.config.use_cache = False
    return whole


@pytest.mark.parametrize("model_type", AXES)
def test_the_axes_of_rows_and_tokens_are_learned(model_type: str) -> None:
    assert derive_architecture(build_skeleton(small_config(model_type), torch.float32)).axes == AXES[model_type]


@pytest.mark.few(2)
@pytest.mark.parametrize("prompts", [[[7, 3, 11, 20]], [[7, 3, 11, 20], [5, 9]], [[3, 4, 5, 6]] * COPIES], ids=len)
def test_greedy_tokens_are_hugging_faces(base: Path, prompts: list[list[int]]) -> None:
    model = open_checkpoint(base)
    with Engine(model) as replayer:
        steps = list(generate(replayer, model, prompts, max_new_tokens=12))
    assert [list(row) for row in zip(*steps, strict=True)] == stock_tokens(whole_model(base), prompts)


@pytest.mark.parametrize("chunk", [None, 3])
def test_log_likelihoods_are_the_whole_models(base: Path, chunk: int | None) -> None:
    prompts, candidates = [[7, 3, 11, 20], [5, 9]], [[[4], [6, 8]], [[10, 12, 13], [14]]]
    model = open_checkpoint(base, loss_chunk=chunk)
    with Engine(model) as replayer:
        scored = score(replayer, model, prompts, candidates).log_likelihoods
    assert sum(scored, ()) == pytest.approx(stock_scores(whole_model(base)), rel=1e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize("rows", [None, 1])
def test_losses_in_chunks_and_micro_batches_are_the_whole_models(base: Path, rows: int | None) -> None:
    whole = whole_model(base)
    for batch in (SQUARE, make_batch(40, [9, 4])):
        with torch.inference_mode():
            expected = float(whole(**batch).loss)
        with Engine(open_checkpoint(base, loss_chunk=3), micro_batch_size=rows) as replayer:
            assert replayer.evaluate([batch]).loss == pytest.approx(expected, rel=1e-5)


def test_mixed_precision_is_monolithic_mezo_under_autocast(base: Path) -> None:
    model = open_checkpoint(base, precision="mixed", dtype="bfloat16", loss_chunk=None)
    literal = MonolithicMeZO(whole_model(base), lr=1e-2, zo_eps=1e-2, autocast=torch.bfloat16)
    with Engine(model, ZerothOrder(MEZO)) as engine:
        assert_steps_alike(engine, literal, [SQUARE] * 2)
        first = engine.journal.updates[0]
    with Engine(open_checkpoint(base, precision="mixed", dtype="bfloat16"), ZerothOrder(MEZO)) as engine:
        # In chunks, as a run has it.
        assert engine.step(SQUARE, seed=first.seeds[0]).losses == pytest.approx(first.losses, rel=1e-2)


def test_a_direction_of_each_row_takes_them_along_their_axis(base: Path) -> None:
    estimator = PerRowRGE(lr=1e-2, zo_eps=1e-2, q=COPIES)
    losses = []
    for chunk in (None, 3):
        with Engine(open_checkpoint(base, loss_chunk=chunk), ZerothOrder(estimator)) as engine:
            losses.append(engine.step(SQUARE, seed=0).losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_directions_of_low_rank_are_right_or_refused_by_name(tmp_path: Path) -> None:
    estimator = MultiQueryRGE(lr=1e-2, zo_eps=1e-2, q=2, perturb_in_place=False)
    for name in AXES:
        small_model(small_config(name)).save_pretrained(tmp_path / name)

    def losses(name: str, chunk: int | None, stack: int | None) -> tuple[float, ...]:
        model = open_checkpoint(tmp_path / name, loss_chunk=chunk)
        with Engine(model, ZerothOrder(estimator, perturbation=LowRankPerturbation(rank=2, stack=stack))) as engine:
            return engine.step(SQUARE, seed=0).losses

    one_by_one = losses("gemma3n_text", None, 1)
    assert len(set(one_by_one)) == 4
    for chunk, stack in ((None, None), (3, None), (3, 1)):
        assert losses("gemma3n_text", chunk, stack) == pytest.approx(one_by_one, rel=1e-5)
    with pytest.raises(UnsupportedModelError, match=r"^model\.layers\.0\..*beside the activations"):
        losses("deepseek_v4", None, None)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft asks for it
def test_a_prefix_is_pefts_and_its_first_values_are_refused_where_layers_share_keys(tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    small_model(small_config("gemma3n_text")).save_pretrained(tmp_path / "base")
    options = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
    zeros = peft.PrefixTuningConfig(**options, init_weights="zero")
    whole = peft.get_peft_model(whole_model(tmp_path / "base"), zeros).eval()
    with torch.inference_mode():
        expected = float(whole(**SQUARE).loss)
    for chunk in (None, 3):
        with Engine(open_checkpoint(tmp_path / "base", adapter=Adapter(config=zeros), loss_chunk=chunk)) as replayer:
            assert replayer.evaluate([SQUARE]).loss == pytest.approx(expected, rel=1e-5)
    real = open_checkpoint(tmp_path / "base", adapter=Adapter(config=peft.PrefixTuningConfig(**options)))
    with pytest.raises(UnsupportedModelError, match="keys and values of 2 layers"), Engine(real) as replayer:
        replayer.evaluate([SQUARE])


def test_a_declaration_with_the_wrong_axes_is_refused_by_name(tmp_path: Path) -> None:
    small_model(small_config("gemma3n_text")).save_pretrained(tmp_path / "base")
    learned = derive_architecture(build_skeleton(small_config("gemma3n_text"), torch.float32))
    wrong = open_checkpoint(tmp_path / "base", architecture=replace(learned, axes=(0, 1)))
    with Engine(wrong) as replayer, pytest.raises(UnsupportedModelError, match="gemma3n_text: found hidden states"):
        replayer.evaluate([make_batch(40, [9, 4])])


def test_declared_models_have_rows_and_tokens_first() -> None:
    assert (
        derive_architecture(build_skeleton(known_config("llama"), torch.float32)).axes
        == ARCHITECTURES["llama"].axes
        == (0, 1)
    )


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


def test_a_declaration_in_a_file_is_what_is_derived(place: Path) -> None:
    declared = open_checkpoint(place / "mistral", architecture=place / "mistral.json").layouts
    assert declared == open_checkpoint(place / "mistral").layouts
    derived = derive_architecture(build_skeleton(small_config("mistral"), declared[0].parameters[0].dtype))
    (place / "derived.json").write_text(json.dumps(asdict(derived)))
    assert open_checkpoint(place / "mistral", architecture=place / "derived.json").layouts == declared


def test_every_command_that_opens_a_model_takes_a_declaration(place: Path) -> None:
    model, data = ("--model", place / "mistral", "--architecture", place / "mistral.json"), ("--data", place / "rows.jsonl")
    for command in (
        ("plan", *model, "--batch-size", 1, "--sequence-length", 8),
        ("verify", *model, "--steps", 1, "--tokens", 4),
        ("train", *model, *data, "--output", place / "run", "--steps", 2),
        ("evaluate", *model, *data),
        ("generate", *model, "--prompt", "the cat", "--max-new-tokens", 1),
        ("tune", *model, *data, "--output", place / "tuned", "--forwards", 40, "--learning-rates", 1e-5, 1e-4),
        ("evaluate", "--run", place / "run", *data),
        ("export", "--run", place / "run", "--output", place / "out"),
    ):
        ended = run_here(*command)
        assert ended.status == 0, (command, ended)


def test_a_run_keeps_its_declaration(place: Path) -> None:
    model = ("--model", place / "mistral", "--architecture", place / "mistral.json")
    data = ("--data", place / "rows.jsonl")
    assert run_here("train", *model, *data, "--output", place / "run", "--steps", 2).status == 0
    assert "architecture: " in refusal("evaluate", "--run", place / "run", "--architecture", place / "rows.jsonl", *data)
    (place / "mistral.json").write_text(json.dumps({**DECLARED, "ignored": ["nothing"]}))
    assert "mistral.json, with sha256" in refusal("train", "--resume", place / "run", "--steps", 3)
    (place / "mistral.json").unlink()
    assert "mistral.json" in refusal("export", "--run", place / "run", "--output", place / "out")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "llama"}, "found a declaration of llama; expected a declaration of mistral"),
        ({"model_type": None}, "model_type: found 'None'; expected a name"),
        ({"head": "lm_head"}, "head: found 'lm_head'; expected a list of names"),
        ({"returned": 4}, "returned: found '4'; expected an integer from 0 to 3"),
        ({"returned": True}, "returned: found 'True'"),
        ({"axes": [1, 1]}, "axes: found '[1, 1]'; expected a list of two different integers from 0 to 7"),
        ({"axes": [0, "1"]}, "axes: found"),
        ({"axes": [1, 2]}, "model type mistral: found hidden states of shape"),
        ({"extra": 1}, "found a field 'extra'"),
        ({"blocks": ...}, "found no 'blocks'"),
        ({"blocks": "model.nothing"}, "model.nothing"),
        ({"blocks": "model.norm"}, "model.norm"),
        ({"head": ["lm_head"]}, "model.norm.weight"),
    ],
)
def test_a_declaration_that_is_none_is_refused(changes: dict[str, Any], said: str, place: Path) -> None:
    values = {name: value for name, value in {**DECLARED, **changes}.items() if value is not ...}
    (place / "wrong.json").write_text(json.dumps(values))
    model = ("--model", place / "mistral", "--architecture", place / "wrong.json")
    assert said in refusal("generate", *model, "--prompt", "the cat", "--max-new-tokens", 1)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000])
def test_files_that_hold_no_declaration_are_refused(content: bytes, place: Path) -> None:
    (place / "wrong.json").write_bytes(content)
    with pytest.raises(OptionError, match=r"wrong\.json"):
        open_checkpoint(place / "mistral", architecture=place / "wrong.json")
    with pytest.raises(OptionError, match="readable"):
        open_checkpoint(place / "mistral", architecture=place / "nowhere.json")
