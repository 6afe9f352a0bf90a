"""Tokenizers of strangers: what they may make of a text is seen from their files, and what is not
seen runs under limits with the same tokens.
"""

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_lines import refusal, within, write_rows
from models import save_model, small_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from zo2adapters.tasks import limited_backend, tokenizer_files
from zo2adapters.tasks.limited_backend import LimitedBackend
from zo2adapters.tasks.rows import RowReader
from zo2adapters.tasks.tokenizer import load_tokenizer
from zo2adapters.tasks.tokenizer_growth import growth_of, parsed, pipeline_of
from zo2core.errors import DataError

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
DOUBLED = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
Edit = Callable[[dict[str, Any]], object]


def many(part: str, steps: list[Any]) -> dict[str, Any]:
    return {"type": "Sequence", part: steps}


def split_by(pattern: str) -> dict[str, Any]:
    rest = {"behavior": "Isolated", "invert": False}
    return {"type": "Split", "pattern": {"Regex": pattern}, **rest}


def template(single: int) -> dict[str, Any]:
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    single_ = [texts[0]] * single
    return {"type": "TemplateProcessing", "single": single_, "pair": texts, "special_tokens": {}}


def saved(path: Path, edit: Edit = lambda definition: None) -> Path:
    """A directory with a byte-level tokenizer, whose tokenizer.json is edited."""
    backend: Any = Tokenizer(models.BPE({letter: i for i, letter in enumerate(ALPHABET)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast  # its constructor is untyped
    make(tokenizer_object=backend, eos_token="!", pad_token="?").save_pretrained(path)
    definition = json.loads((path / "tokenizer.json").read_text())
    edit(definition)
    (path / "tokenizer.json").write_text(json.dumps(definition))
    return path


# how a tokenizer is edited, and how many bytes it may make of one
GROWTHS: dict[str, tuple[dict[str, Any], float | None]] = {
    "plain": ({}, 1),
    "a form of Unicode": ({"normalizer": {"type": "NFKC"}}, 11),
    "sentencepiece's space": (
        {
            "normalizer": many(
                "normalizers",
                [
                    {"type": "Prepend", "prepend": "▁"},
                    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
                ],
            )
        },
        3,
    ),
    "a pattern that is replaced": (
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}},
        4,
    ),
    "ten doublings": ({"normalizer": many("normalizers", [DOUBLED] * 10)}, 1024),
    "a known pattern": ({"pre_tokenizer": split_by(r"\s+")}, 1),
    "groups": ({"pre_tokenizer": split_by("(a|b)+c")}, None),
    "many optional letters": ({"pre_tokenizer": split_by("a?" * 30 + "b")}, None),
    "a repetition within": ({"pre_tokenizer": split_by("a*b")}, None),
    "an escaped star": ({"pre_tokenizer": split_by(r"a\*")}, None),
    "a text once": ({"post_processor": template(1)}, 1),
    "a text twice": ({"post_processor": template(2)}, None),
    "a long template": ({"post_processor": template(1000)}, None),
    "more steps than anybody needs": ({"normalizer": many("normalizers", [DOUBLED] * 65)}, None),
    "steps in steps": (
        {"normalizer": many("normalizers", [many("normalizers", [DOUBLED])])},
        None,
    ),
    "an empty pattern": (
        {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "a"}},
        None,
    ),
    "an unknown step": ({"normalizer": {"type": "Reverse"}}, None),
    "a long prefix": ({"normalizer": {"type": "Prepend", "prepend": "a" * 65}}, None),
}


@pytest.mark.parametrize(("changes", "growth"), GROWTHS.values(), ids=GROWTHS)
def test_what_a_tokenizer_makes_of_a_byte_is_seen_from_its_file(
    changes: dict[str, Any], growth: float | None, tmp_path: Path
) -> None:
    path = saved(tmp_path / "model", lambda definition: definition.update(changes))
    assert growth_of(parsed((path / "tokenizer.json").read_text())).encoding == growth


def test_a_file_that_can_be_read_in_two_ways_is_not_known() -> None:
    assert parsed('{"normalizer": null, "normalizer": null}') is None
    assert parsed("[" * 100_000) is None
    assert growth_of(None) == growth_of([]) == growth_of({"model": 3}) == (None, None)


def test_a_loaded_tokenizer_has_the_growth_of_its_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "model", lambda d: d.update(normalizer={"type": "NFC"}))
    backend = AutoTokenizer.from_pretrained(path).backend_tokenizer
    loaded = pipeline_of(backend)
    loaded["model"]["vocab"] = backend.get_vocab()
    assert growth_of(loaded) == growth_of(parsed((path / "tokenizer.json").read_text()))


UNKNOWN: dict[str, Edit] = {
    "a pattern": lambda d: d.update(
        pre_tokenizer=many("pretokenizers", [split_by("(e|i)+"), BYTES])
    ),
    "a template": lambda d: d.update(
        pre_tokenizer=many("pretokenizers", [split_by("(e|i)+"), BYTES]), post_processor=template(2)
    ),
    "a normalizer": lambda d: d.update(
        normalizer={"type": "Replace", "pattern": {"Regex": "(a|e)"}, "content": "oo"},
        decoder=many("decoders", [BYTES, {**DOUBLED, "pattern": {"Regex": "(o)"}}]),
    ),
}
TEXTS = ["", "a", "the kettle sings at noon", "é\u2028 日本 \U0001f600", "a!b?", "x" * 200]


@pytest.mark.parametrize("edit", UNKNOWN.values(), ids=UNKNOWN)
def test_under_limits_texts_have_the_tokens_that_they_have_without(
    edit: Edit, tmp_path: Path
) -> None:
    path = saved(tmp_path / "model", edit)
    plain: Any = AutoTokenizer.from_pretrained(path)
    limited: Any = load_tokenizer(path)
    assert isinstance(limited.backend_tokenizer, LimitedBackend)
    for options in ({}, {"add_special_tokens": False}, {"truncation": True, "max_length": 5}):
        for text in TEXTS:
            given = {"verbose": False, **options}
            assert dict(limited(text, **given)) == dict(plain(text, **given))
            assert dict(limited(text, "b c", **given)) == dict(plain(text, "b c", **given))
    assert dict(limited(TEXTS, padding=True)) == dict(plain(TEXTS, padding=True))
    ids = plain("the kettle!")["input_ids"]
    for skip in (False, True):
        assert limited.decode(ids, skip_special_tokens=skip) == plain.decode(
            ids, skip_special_tokens=skip
        )
    for tokenizer in (plain, limited):
        tokenizer.add_tokens(["kettle"])
    assert limited("the kettle")["input_ids"] == plain("the kettle")["input_ids"]
    limited_backend.release()
    assert copy.deepcopy(limited)("the kettle")["input_ids"] == plain("the kettle")["input_ids"]


def test_short_texts_of_plain_tokenizers_need_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError

    tokenizer: Any = load_tokenizer(saved(tmp_path / "model"))
    expected = tokenizer("x" * 3000)["input_ids"]
    monkeypatch.setattr(limited_backend, "_ROOM", 2999)
    assert tokenizer("x" * 3000)["input_ids"] == expected, "in a process"
    monkeypatch.setattr(limited_backend, "_process", refused)
    assert tokenizer("x" * 2999)["input_ids"] == expected[1:]
    assert tokenizer.decode(expected) == "x" * 3000
    with pytest.raises(AssertionError):
        tokenizer("x" * 3000)


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that are reached at once."""
    monkeypatch.setattr(limited_backend, "MEMORY", 1 << 25)
    monkeypatch.setattr(limited_backend, "SECONDS", 1.0)


@pytest.mark.usefixtures("little")
def test_what_takes_too_much_is_refused_by_its_row(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "b"}, {"text": "banana"}])
    doublings = many("normalizers", [DOUBLED] * 40)
    path = saved(tmp_path / "model", lambda d: d.update(normalizer=doublings))
    names = json.loads((path / "tokenizer_config.json").read_text())
    assert names["eos_token"] == "!"
    (path / "tokenizer_config.json").write_text('{"eos_token": "!"}')
    (path / "special_tokens_map.json").unlink(missing_ok=True)
    with within(60), pytest.raises(DataError, match="line 2: found a text of 6 characters that"):
        RowReader(load_tokenizer(path), 64).read(rows)


@pytest.mark.long_profile
@pytest.mark.usefixtures("little")
def test_tokens_that_take_too_much_are_not_decoded(tmp_path: Path) -> None:
    decoder = many("decoders", [DOUBLED] * 40 + [BYTES])
    tokenizer = load_tokenizer(saved(tmp_path / "decodes", lambda d: d.update(decoder=decoder)))
    ids = tokenizer("banana")["input_ids"]
    with within(60), pytest.raises(DataError, match="6 tokens that the tokenizer does not decode"):
        tokenizer.decode(ids)


@pytest.mark.usefixtures("little")
def test_a_tokenizer_that_takes_too_much_when_it_is_loaded_is_refused(tmp_path: Path) -> None:
    added = {"id": 300, "content": "aaa", "normalized": True, "special": False}
    added |= {"single_word": False, "lstrip": False, "rstrip": False}
    doublings = many("normalizers", [DOUBLED] * 40)

    def of_definition(definition: dict[str, Any]) -> None:
        definition["normalizer"] = doublings
        definition["added_tokens"].append(added)

    path = saved(tmp_path / "model", of_definition)
    with within(60), pytest.raises(DataError, match=r"tokenizer\.json cannot be loaded within 32"):
        load_tokenizer(path)


@pytest.mark.long_profile
@pytest.mark.usefixtures("little")
@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"]
)
def test_names_of_tokens_beside_it_are_tried_as_well(name: str, tmp_path: Path) -> None:
    doublings = many("normalizers", [DOUBLED] * 40)
    path = saved(tmp_path / "model", lambda d: d.update(normalizer=doublings))
    (path / "tokenizer_config.json").write_text("{}")
    content = {"aaa": 300} if name == "added_tokens.json" else {"tokens": {"0": {"content": "aaa"}}}
    (path / name).write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be loaded within 32"):
        tokenizer_files.require_loadable(path)


def test_a_file_of_very_many_values_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "model")
    monkeypatch.setattr(tokenizer_files, "_MOST_PARTS", 100)
    with pytest.raises(DataError, match=r"tokenizer\.json of \d+ parts, where 100 are allowed"):
        load_tokenizer(path)


@pytest.mark.long_profile
@pytest.mark.usefixtures("little")
def test_a_command_tells_it_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "base", small_config("llama", vocab_size=300))
    doublings = many("normalizers", [DOUBLED] * 40)
    saved(tmp_path / "base", lambda d: d.update(normalizer=doublings))
    (tmp_path / "base" / "tokenizer_config.json").write_text('{"eos_token": "!"}')
    write_rows(tmp_path / "rows.jsonl", [{"text": "banana"}])
    with within(60):
        told = refusal("evaluate", "--model", "base", "--data", "rows.jsonl")
    assert "rows.jsonl, line 1: found a text of 6 characters" in told


def test_text_that_is_no_unicode_is_refused(tmp_path: Path) -> None:
    tokenizer: Any = load_tokenizer(saved(tmp_path / "base"))
    for text in ("ab\udcff", "\ud83d", ["fine", "x\udc80y"]):
        with pytest.raises(DataError, match=r"^text: found .*\\ud.*PYTHONUTF8=1"):
            tokenizer(text)


def test_a_directory_whose_name_the_library_would_not_find_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "base").rename(tmp_path / "bäse")
    assert load_tokenizer(tmp_path / "bäse").eos_token == "!"
    directory = (tmp_path / "bäse").rename(tmp_path / os.fsdecode(b"b\xff"))
    with pytest.raises(DataError, match=r"a path that is not UTF-8, .*PYTHONUTF8=1"):
        load_tokenizer(directory)
