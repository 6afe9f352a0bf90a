"""Benchmarks by name, the eleven tasks of MeZO and those of P-RGE: where their rows come from, and their prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zo2adapters.tasks.row_source import Cell
from zo2core.errors import DataError

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A benchmark.

    Prompts are those of MeZO's program (arXiv 2305.17333), or of P-RGE (arXiv 2409.15520, Table 7) where MeZO has none.
    """

    name: str
    hub: tuple[str, str | None]
    questions: Callable[[Row], Iterable[dict[str, Any]]]


def question(prompt: str, candidates: Sequence[str], answer: int | list[int]) -> list[dict[str, Any]]:
    """Make a row with candidates."""
    if len(candidates) < 2 or answer == []:
        raise DataError(
            "candidates",
            found=f"{len(candidates)} candidates, of which {answer} are right",
            expected="at least two candidates, and a right one",
            remedy="remove the row",
        )
    return [{"prompt": prompt, "candidates": list(candidates), "answer": answer}]


def label(row: Row, *names: str) -> int:
    """Read a row's label as a number."""
    value = row.get("label")
    if isinstance(value, str) and value.lower() in ("true", "false"):
        value = value.lower() == "true"
    if isinstance(value, str) and value in names:
        return names.index(value)
    value = value.value if isinstance(value, Cell) else value
    if isinstance(value, (bool, int)) and 0 <= int(value) < len(names):
        return int(value)
    raise DataError(
        "label", found=repr(value)[:40], expected=f"one of {', '.join(names)}, or its number", remedy="use rows with labels"
    )


def _boolq(row: Row) -> list[dict[str, Any]]:
    """BoolQ: is the answer to a question about a passage yes?"""
    text = row["question"] if row["question"].endswith("?") else f"{row['question']}?"
    prompt = f"{row['passage']} {text[:1].upper()}{text[1:]}\n"
    return question(prompt, ("No", "Yes"), label(row, "no", "yes"))


def _cb(row: Row) -> list[dict[str, Any]]:
    """CommitmentBank: does a premise entail a hypothesis, contradict it, or neither?"""
    prompt = f'Suppose {row["premise"]} Can we infer that "{row["hypothesis"]}"? Yes, No, or Maybe?\n'
    return question(prompt, ("Yes", "No", "Maybe"), label(row, "entailment", "contradiction", "neutral"))


_CONJUNCTIONS = {"cause": "because", "effect": "so"}


def _copa(row: Row) -> list[dict[str, Any]]:
    """COPA: which of two sentences is the cause, or the effect, of a premise?"""
    prompt = f"{row['premise'].rstrip().removesuffix('.')} {_CONJUNCTIONS[row['question']]}"
    candidates = [f" {_continued(row[choice])}" for choice in ("choice1", "choice2")]
    return question(prompt, candidates, label(row, "choice1", "choice2"))


def _continued(sentence: str) -> str:
    """A sentence as it continues after a conjunction: the first word is in lower case, unless it is I."""
    first, space, rest = sentence.partition(" ")
    return f"{first if first == 'I' else first.lower()}{space}{rest}"


def _drop(row: Row) -> list[dict[str, Any]]:
    """DROP: answer a question about a passage, by counting and comparing."""
    answers = row["answers_spans"]["spans"]
    prompt = f"Passage: {row['passage']}\nQuestion: {row['question'].strip()}\nAnswer:"
    return [{"prompt": prompt, "completion": f" {answers[0]}\n", "answers": answers}]


def _mrpc(row: Row) -> list[dict[str, Any]]:
    """MRPC: do two sentences mean the same?"""
    instruction = "Do the following two sentences mean the same thing? Yes or No?"
    prompt = f"{instruction}\nSentence 1: {row['sentence1']}\nSentence 2: {row['sentence2']}\n"
    return question(prompt, ("No", "Yes"), label(row, "not_equivalent", "equivalent"))


def _multirc(row: Row) -> list[dict[str, Any]]:
    """MultiRC: is an answer to a question about a paragraph right? Each answer gives a row."""
    if "passage" not in row:
        return _multirc_question(row["paragraph"], row["question"], row["answer"], row)
    passage = row["passage"]  # a line of the benchmark's own files is a passage
    return [
        converted
        for entry in passage["questions"]
        for answer in entry["answers"]
        for converted in _multirc_question(passage["text"], entry["question"], answer["text"], answer)
    ]


def _multirc_question(paragraph: str, text: str, answer: str, labelled: Row) -> list[dict[str, Any]]:
    prompt = f'{paragraph}\nQuestion: {text}\nI found this answer "{answer}". Is that correct? Yes or No?\n'
    return question(prompt, ("No", "Yes"), label(labelled, "no", "yes"))


def _qnli(row: Row) -> list[dict[str, Any]]:
    """QNLI: does a sentence answer a question?"""
    instruction = "Does this sentence answer the question? Yes or No?"
    prompt = f"{instruction}\nSentence 1: {row['question']}\nSentence 2: {row['sentence']}\n"
    return question(prompt, ("Yes", "No"), label(row, "entailment", "not_entailment"))


def _qqp(row: Row) -> list[dict[str, Any]]:
    """QQP: do two questions ask the same?"""
    instruction = "Are these two questions asking the same thing? Yes or No?"
    prompt = f"{instruction}\nQuestion 1: {row['question1']}\nQuestion 2: {row['question2']}\n"
    return question(prompt, ("No", "Yes"), label(row, "not_duplicate", "duplicate"))


def _record(row: Row) -> list[dict[str, Any]]:
    """ReCoRD: which entity of a passage belongs in a sentence? Several names of it may be right."""
    if isinstance(row["passage"], str):
        return _record_question(row["passage"], row["query"], row["entities"], row["answers"])
    text, spans = row["passage"]["text"], row["passage"]["entities"]  # a line of the benchmark's own files is a passage
    entities = list(dict.fromkeys(text[span["start"] : span["end"] + 1] for span in spans))
    return [
        converted
        for query in row["qas"]
        for converted in _record_question(text, query["query"], entities, [answer["text"] for answer in query["answers"]])
    ]


def _record_question(passage: str, query: str, entities: list[str], answers: list[str]) -> list[dict[str, Any]]:
    right = [index for index, entity in enumerate(entities) if entity in answers]
    prompt = passage.replace("@highlight\n", "- ") + "\n-"
    return question(prompt, [f" {query.replace('@placeholder', entity)}" for entity in entities], right)


def _rte(row: Row) -> list[dict[str, Any]]:
    """RTE: does a premise entail a hypothesis?"""
    prompt = f'{row["premise"]}\nDoes this mean that "{row["hypothesis"]}" is true? Yes or No?\n'
    return question(prompt, ("Yes", "No"), label(row, "entailment", "not_entailment"))


def _squad(row: Row) -> list[dict[str, Any]]:
    """SQuAD: answer a question with words of a paragraph."""
    answers = row["answers"]["text"]
    prompt = f"Title: {row['title']}\nContext: {row['context']}\nQuestion: {row['question'].strip()}\nAnswer:"
    return [{"prompt": prompt, "completion": f" {answers[0]}\n", "answers": answers}]


def _sst2(row: Row) -> list[dict[str, Any]]:
    """SST-2: is a sentence of a film review positive?"""
    prompt = f"{row['sentence'].strip()} It was"
    return question(prompt, (" terrible", " great"), label(row, "negative", "positive"))


def _wic(row: Row) -> list[dict[str, Any]]:
    """Words in context: has a word the same meaning in two sentences?"""
    instruction = f'Does the word "{row["word"]}" have the same meaning in these two sentences? Yes, No?'
    prompt = f"{instruction}\n{row['sentence1']}\n{row['sentence2']}\n"
    return question(prompt, ("No", "Yes"), label(row, "no", "yes"))


def _winogrande(row: Row) -> list[dict[str, Any]]:
    """WinoGrande: which of two nouns belongs in a sentence? The candidates are the noun and the rest of the sentence."""
    before, _, after = row["sentence"].partition("_")
    answer = {"1": 0, "2": 1}[str(row["answer"])]
    return question(before.rstrip(), [f" {row[option]}{after}" for option in ("option1", "option2")], answer)


def _wnli(row: Row) -> list[dict[str, Any]]:
    """WNLI: does one sentence follow from another?"""
    instruction = "Given the first sentence, is the second sentence true? Yes or No?"
    prompt = f"{instruction}\nSentence 1: {row['sentence1']}\nSentence 2: {row['sentence2']}\n"
    return question(prompt, ("No", "Yes"), label(row, "not_entailment", "entailment"))


def _wsc(row: Row) -> list[dict[str, Any]]:
    """Winograd schemas: does a pronoun refer to a noun?"""
    spans = row.get("target", row)  # an object in the benchmark's own files
    noun, pronoun = spans["span1_text"], spans["span2_text"].lower()
    prompt = f'{row["text"]}\nIn the previous sentence, does the pronoun "{pronoun}" refer to {noun}? Yes or No?\n'
    return question(prompt, ("No", "Yes"), label(row, "no", "yes"))


BENCHMARKS: Mapping[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(name="boolq", hub=("aps/super_glue", "boolq"), questions=_boolq),
        Benchmark(name="cb", hub=("aps/super_glue", "cb"), questions=_cb),
        Benchmark(name="copa", hub=("aps/super_glue", "copa"), questions=_copa),
        Benchmark(name="drop", hub=("ucinlp/drop", None), questions=_drop),
        Benchmark(name="mrpc", hub=("nyu-mll/glue", "mrpc"), questions=_mrpc),
        Benchmark(name="multirc", hub=("aps/super_glue", "multirc"), questions=_multirc),
        Benchmark(name="qnli", hub=("nyu-mll/glue", "qnli"), questions=_qnli),
        Benchmark(name="qqp", hub=("nyu-mll/glue", "qqp"), questions=_qqp),
        Benchmark(name="record", hub=("aps/super_glue", "record"), questions=_record),
        Benchmark(name="rte", hub=("aps/super_glue", "rte"), questions=_rte),
        Benchmark(name="squad", hub=("rajpurkar/squad", None), questions=_squad),
        Benchmark(name="sst2", hub=("nyu-mll/glue", "sst2"), questions=_sst2),
        Benchmark(name="wic", hub=("aps/super_glue", "wic"), questions=_wic),
        Benchmark(name="winogrande", hub=("allenai/winogrande", "winogrande_debiased"), questions=_winogrande),
        Benchmark(name="wnli", hub=("nyu-mll/glue", "wnli"), questions=_wnli),
        Benchmark(name="wsc", hub=("aps/super_glue", "wsc.fixed"), questions=_wsc),
    )
}
