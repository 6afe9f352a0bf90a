"""Benchmarks by name, MeZO's eleven tasks and P-RGE's: where their rows come from, and what question each row asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zo2core import DataError

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Prompts are those of MeZO's program (arXiv 2305.17333), or of P-RGE (arXiv 2409.15520, Table 7) where MeZO has none.

    Args:
        name: What it is called.
        hub: Its path in the hub, and the name of its configuration there.
        questions: A row in the benchmark's own format, or as ``datasets`` gives it, to rows of ``prompt``, ``candidates``
            and ``answer``, or of ``prompt``, ``completion`` and ``answers`` where the answer is to be written.
    """

    name: str
    hub: tuple[str, str | None]
    questions: Callable[[Row], Iterable[dict[str, Any]]]


def question(prompt: str, candidates: Sequence[str], answer: int | list[int]) -> list[dict[str, Any]]:
    """A row with candidates.

    Raises:
        DataError: if there are fewer than two, or none is right.
    """
    if len(candidates) < 2 or answer == []:
        raise DataError(
            "candidates",
            found=f"{len(candidates)} of them, right ones {answer}",
            expected="two at least, one of which is right",
            remedy="leave the row out",
        )
    return [{"prompt": prompt, "candidates": list(candidates), "answer": answer}]


def label(row: Row, *names: str) -> int:
    """A row's label as a number.

    Args:
        row: Its ``label`` is a number, a truth value, or one of the names.
        names: Of labels 0, 1, ...

    Raises:
        DataError: if it has none, as the rows of hidden test sets.
    """
    value = row.get("label")
    if isinstance(value, str) and value.lower() in ("true", "false"):
        value = value.lower() == "true"
    if isinstance(value, str) and value in names:
        return names.index(value)
    if isinstance(value, (bool, int)) and 0 <= int(value) < len(names):
        return int(value)
    raise DataError(
        "label", found=repr(value)[:40], expected=f"one of {', '.join(names)}, or its number", remedy="use rows with labels"
    )


def _boolq(row: Row) -> list[dict[str, Any]]:
    """BoolQ: is the answer to a question about a passage yes?"""
    asked = row["question"] if row["question"].endswith("?") else f"{row['question']}?"
    prompt = f"{row['passage']} {asked[:1].upper()}{asked[1:]}\n"
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
    """A sentence as it goes on after a conjunction: its first word is not capital, unless it is I."""
    first, space, rest = sentence.partition(" ")
    return f"{first if first == 'I' else first.lower()}{space}{rest}"


def _drop(row: Row) -> list[dict[str, Any]]:
    """DROP: answer a question about a passage, by counting and comparing."""
    answers = row["answers_spans"]["spans"]
    prompt = f"Passage: {row['passage']}\nQuestion: {row['question'].strip()}\nAnswer:"
    return [{"prompt": prompt, "completion": f" {answers[0]}\n", "answers": answers}]


def _mrpc(row: Row) -> list[dict[str, Any]]:
    """MRPC: do two sentences mean the same?"""
    asked = "Do the following two sentences mean the same thing? Yes or No?"
    prompt = f"{asked}\nSentence 1: {row['sentence1']}\nSentence 2: {row['sentence2']}\n"
    return question(prompt, ("No", "Yes"), label(row, "not_equivalent", "equivalent"))


def _multirc(row: Row) -> list[dict[str, Any]]:
    """MultiRC: is an answer to a question about a paragraph right? Each answer is a question of its own."""
    if "passage" not in row:
        return _multirc_asked(row["paragraph"], row["question"], row["answer"], row)
    passage = row["passage"]  # the benchmark's own files have a line a passage
    return [
        asked
        for of_passage in passage["questions"]
        for answer in of_passage["answers"]
        for asked in _multirc_asked(passage["text"], of_passage["question"], answer["text"], answer)
    ]


def _multirc_asked(paragraph: str, asked: str, answer: str, labelled: Row) -> list[dict[str, Any]]:
    prompt = f'{paragraph}\nQuestion: {asked}\nI found this answer "{answer}". Is that correct? Yes or No?\n'
    return question(prompt, ("No", "Yes"), label(labelled, "no", "yes"))


def _qnli(row: Row) -> list[dict[str, Any]]:
    """QNLI: does a sentence answer a question?"""
    asked = "Does this sentence answer the question? Yes or No?"
    prompt = f"{asked}\nSentence 1: {row['question']}\nSentence 2: {row['sentence']}\n"
    return question(prompt, ("Yes", "No"), label(row, "entailment", "not_entailment"))


def _qqp(row: Row) -> list[dict[str, Any]]:
    """QQP: do two questions ask the same?"""
    asked = "Are these two questions asking the same thing? Yes or No?"
    prompt = f"{asked}\nQuestion 1: {row['question1']}\nQuestion 2: {row['question2']}\n"
    return question(prompt, ("No", "Yes"), label(row, "not_duplicate", "duplicate"))


def _record(row: Row) -> list[dict[str, Any]]:
    """ReCoRD: which entity of a passage belongs into a sentence? Any of its names that are right will do."""
    if isinstance(row["passage"], str):
        return _record_asked(row["passage"], row["query"], row["entities"], row["answers"])
    text, places = row["passage"]["text"], row["passage"]["entities"]  # the benchmark's own files have a line a passage
    entities = list(dict.fromkeys(text[place["start"] : place["end"] + 1] for place in places))
    return [
        asked
        for query in row["qas"]
        for asked in _record_asked(text, query["query"], entities, [answer["text"] for answer in query["answers"]])
    ]


def _record_asked(passage: str, query: str, entities: list[str], answers: list[str]) -> list[dict[str, Any]]:
    right = [place for place, entity in enumerate(entities) if entity in answers]
    prompt = passage.replace("@highlight\n", "- ") + "\n-"
    return question(prompt, [f" {query.replace('@placeholder', entity)}" for entity in entities], right)


def _rte(row: Row) -> list[dict[str, Any]]:
    """RTE: does a premise entail a hypothesis?"""
    prompt = f'{row["premise"]}\nDoes this mean that "{row["hypothesis"]}" is true? Yes or No?\n'
    return question(prompt, ("Yes", "No"), label(row, "entailment", "not_entailment"))


def _squad(row: Row) -> list[dict[str, Any]]:
    """SQuAD: answer a question by words of a paragraph."""
    answers = row["answers"]["text"]
    prompt = f"Title: {row['title']}\nContext: {row['context']}\nQuestion: {row['question'].strip()}\nAnswer:"
    return [{"prompt": prompt, "completion": f" {answers[0]}\n", "answers": answers}]


def _sst2(row: Row) -> list[dict[str, Any]]:
    """SST-2: is a sentence of a film review positive?"""
    prompt = f"{row['sentence'].strip()} It was"
    return question(prompt, (" terrible", " great"), label(row, "negative", "positive"))


def _wic(row: Row) -> list[dict[str, Any]]:
    """Words in context: has a word the same meaning in two sentences?"""
    asked = f'Does the word "{row["word"]}" have the same meaning in these two sentences? Yes, No?'
    prompt = f"{asked}\n{row['sentence1']}\n{row['sentence2']}\n"
    return question(prompt, ("No", "Yes"), label(row, "no", "yes"))


def _winogrande(row: Row) -> list[dict[str, Any]]:
    """WinoGrande: which of two nouns belongs into a sentence? The sentence is scored from where it stands."""
    before, _, after = row["sentence"].partition("_")
    answer = {"1": 0, "2": 1}[str(row["answer"])]
    return question(before.rstrip(), [f" {row[option]}{after}" for option in ("option1", "option2")], answer)


def _wnli(row: Row) -> list[dict[str, Any]]:
    """WNLI: does one sentence follow from another?"""
    asked = "Given the first sentence, is the second sentence true? Yes or No?"
    prompt = f"{asked}\nSentence 1: {row['sentence1']}\nSentence 2: {row['sentence2']}\n"
    return question(prompt, ("No", "Yes"), label(row, "not_entailment", "entailment"))


def _wsc(row: Row) -> list[dict[str, Any]]:
    """Winograd schemas: does a pronoun refer to a noun?"""
    spans = row.get("target", row)  # in the benchmark's own files in an object of their own
    noun, pronoun = spans["span1_text"], spans["span2_text"].lower()
    prompt = f'{row["text"]}\nIn the previous sentence, does the pronoun "{pronoun}" refer to {noun}? Yes or No?\n'
    return question(prompt, ("No", "Yes"), label(row, "no", "yes"))


BENCHMARKS: Mapping[str, Benchmark] = {
    known.name: known
    for known in (
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
