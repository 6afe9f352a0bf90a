"""Benchmarks by name, the eleven tasks of MeZO and those of P-RGE: their prompts, and rows sampled
as MeZO's are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zo2adapters.tasks.row_source import at_row, parsed_rows, row_error
from zo2adapters.tasks.row_values import Cell
from zo2adapters.tasks.rows import shuffled
from zo2core.errors import DataError, OptionError
from zo2core.ranges import require_whole

Row = Mapping[str, Any]
Rows = list[dict[str, Any]]

# names of the file of labelled rows that are not trained on
_HELD_OUT = ("validation", "val", "dev", "valid")
_SEPARATOR = "\n\n"  # between demonstrations


class Benchmark(NamedTuple):
    """A benchmark.

    Prompts are those of MeZO's program (arXiv 2305.17333), or of P-RGE (arXiv 2409.15520, Table 7)
    where MeZO has none.
    """

    name: str
    hub: str  # name on the hub, with its configuration behind a colon if there are several
    questions: Callable[[Row], Iterable[dict[str, Any]]]


def _question(prompt: str, candidates: Sequence[str], answer: int | list[int]) -> Rows:
    """Make a row with candidates."""
    if len(candidates) < 2 or answer == []:
        found = f"{len(candidates)} candidates, of which {answer} are right"
        raise row_error(found, "at least two candidates, and a right one", "remove the row")
    return [{"prompt": prompt, "candidates": list(candidates), "answer": answer}]


def _label(row: Row, *names: str) -> int:
    """Read a row's label as a number."""
    value = row.get("label")
    if isinstance(value, str) and value.lower() in ("true", "false"):
        value = value.lower() == "true"
    if isinstance(value, str) and value in names:
        return names.index(value)
    value = value.value if isinstance(value, Cell) else value
    if isinstance(value, (bool, int)) and 0 <= int(value) < len(names):
        return int(value)
    raise row_error(
        repr(value)[:40], f"one of {', '.join(names)}, or its number", "use rows with labels"
    )


def _template(prompt: str, candidates: Sequence[str], *labels: str) -> Callable[[Row], Rows]:
    """Questions whose prompt is a text with columns in it, and whose candidates stand for the
    labels, in order.
    """
    return lambda row: _question(prompt.format_map(row), candidates, _label(row, *labels))


def _pair(
    instruction: str, first: str, second: str, candidates: Sequence[str], *labels: str
) -> Callable[[Row], Rows]:
    """Questions about two sentences, each of a column."""
    prompt = f"{instruction} Yes or No?\nSentence 1: {{{first}}}\nSentence 2: {{{second}}}\n"
    return _template(prompt, candidates, *labels)


_NO_YES = ("No", "Yes")
_YES_NO = ("Yes", "No")
_YES_NO_MAYBE = ("Yes", "No", "Maybe")


def _boolq(row: Row) -> Rows:
    """BoolQ: is the answer to a question about a passage yes?"""
    text = row["question"] if row["question"].endswith("?") else f"{row['question']}?"
    prompt = f"{row['passage']} {text[:1].upper()}{text[1:]}\n"
    return _question(prompt, _NO_YES, _label(row, "no", "yes"))


_CONJUNCTIONS = {"cause": "because", "effect": "so"}


def _copa(row: Row) -> Rows:
    """COPA: which of two sentences is the cause, or the effect, of a premise?"""
    prompt = f"{row['premise'].rstrip().removesuffix('.')} {_CONJUNCTIONS[row['question']]}"
    candidates = [f" {_continued(row[choice])}" for choice in ("choice1", "choice2")]
    return _question(prompt, candidates, _label(row, "choice1", "choice2"))


def _continued(sentence: str) -> str:
    """A sentence as it continues after a conjunction: the first word is in lower case, unless it is
    I.
    """
    first, space, rest = sentence.partition(" ")
    return f"{first if first == 'I' else first.lower()}{space}{rest}"


def _drop(row: Row) -> Rows:
    """DROP: answer a question about a passage, by counting and comparing."""
    answers = row["answers_spans"]["spans"]
    prompt = f"Passage: {row['passage']}\nQuestion: {row['question'].strip()}\nAnswer:"
    return [{"prompt": prompt, "completion": f" {answers[0]}\n", "answers": answers}]


def _multirc(row: Row) -> Rows:
    """MultiRC: is an answer to a question about a paragraph right? Each answer gives a row."""
    if "passage" not in row:
        return _multirc_question(row["paragraph"], row["question"], row["answer"], row)
    passage = row["passage"]  # a line of the benchmark's own files is a passage
    return [
        converted
        for entry in passage["questions"]
        for answer in entry["answers"]
        for converted in _multirc_question(
            passage["text"], entry["question"], answer["text"], answer
        )
    ]


def _multirc_question(paragraph: str, text: str, answer: str, labelled: Row) -> Rows:
    prompt = (
        f'{paragraph}\nQuestion: {text}\nI found this answer "{answer}". Is that correct? Yes or '
        "No?\n"
    )
    return _question(prompt, _NO_YES, _label(labelled, "no", "yes"))


def _record(row: Row) -> Rows:
    """ReCoRD: which entity of a passage belongs in a sentence? Several names of it may be right."""
    if isinstance(row["passage"], str):
        return _record_question(row["passage"], row["query"], row["entities"], row["answers"])
    # a line of the benchmark's own files is a passage
    text = row["passage"]["text"]
    spans = row["passage"]["entities"]
    entities = list(dict.fromkeys(text[span["start"] : span["end"] + 1] for span in spans))
    return [
        converted
        for query in row["qas"]
        for converted in _record_question(
            text, query["query"], entities, [answer["text"] for answer in query["answers"]]
        )
    ]


def _record_question(passage: str, query: str, entities: list[str], answers: list[str]) -> Rows:
    right = [index for index, entity in enumerate(entities) if entity in answers]
    prompt = passage.replace("@highlight\n", "- ") + "\n-"
    return _question(
        prompt, [f" {query.replace('@placeholder', entity)}" for entity in entities], right
    )


def _squad(row: Row) -> Rows:
    """SQuAD: answer a question with words of a paragraph."""
    answers = row["answers"]["text"]
    prompt = (
        f"Title: {row['title']}\nContext: {row['context']}\nQuestion: "
        f"{row['question'].strip()}\nAnswer:"
    )
    return [{"prompt": prompt, "completion": f" {answers[0]}\n", "answers": answers}]


def _sst2(row: Row) -> Rows:
    """SST-2: is a sentence of a film review positive?"""
    prompt = f"{row['sentence'].strip()} It was"
    return _question(prompt, (" terrible", " great"), _label(row, "negative", "positive"))


def _winogrande(row: Row) -> Rows:
    """WinoGrande: which of two nouns belongs in a sentence?

    The candidates are the noun and the rest of the sentence.
    """
    beginning, _, after = row["sentence"].partition("_")
    answer = {"1": 0, "2": 1}[str(row["answer"])]
    return _question(
        beginning.rstrip(), [f" {row[option]}{after}" for option in ("option1", "option2")], answer
    )


def _wsc(row: Row) -> Rows:
    """Winograd schemas: does a pronoun refer to a noun?"""
    spans = row.get("target", row)  # an object in the benchmark's own files
    noun = spans["span1_text"]
    pronoun = spans["span2_text"].lower()
    prompt = (
        f'{row["text"]}\nIn the previous sentence, does the pronoun "{pronoun}" refer to {noun}? '
        "Yes or No?\n"
    )
    return _question(prompt, _NO_YES, _label(row, "no", "yes"))


_CB = 'Suppose {premise} Can we infer that "{hypothesis}"? Yes, No, or Maybe?\n'
_RTE = '{premise}\nDoes this mean that "{hypothesis}" is true? Yes or No?\n'
_WIC = (
    'Does the word "{word}" have the same meaning in these two sentences? Yes, '
    "No?\n{sentence1}\n{sentence2}\n"
)
_MRPC = "Do the following two sentences mean the same thing?", "sentence1", "sentence2"
_QNLI = "Does this sentence answer the question?", "question", "sentence"
_QQP = (
    "Are these two questions asking the same thing? Yes or No?\nQuestion 1: {question1}\nQuestion "
    "2: {question2}\n"
)
_WNLI = "Given the first sentence, is the second sentence true?", "sentence1", "sentence2"
BENCHMARKS: Mapping[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("boolq", "aps/super_glue:boolq", _boolq),
        Benchmark(
            "cb",
            "aps/super_glue:cb",
            _template(_CB, _YES_NO_MAYBE, "entailment", "contradiction", "neutral"),
        ),
        Benchmark("copa", "aps/super_glue:copa", _copa),
        Benchmark("drop", "ucinlp/drop", _drop),
        Benchmark(
            "mrpc", "nyu-mll/glue:mrpc", _pair(*_MRPC, _NO_YES, "not_equivalent", "equivalent")
        ),
        Benchmark("multirc", "aps/super_glue:multirc", _multirc),
        Benchmark(
            "qnli", "nyu-mll/glue:qnli", _pair(*_QNLI, _YES_NO, "entailment", "not_entailment")
        ),
        Benchmark(
            "qqp", "nyu-mll/glue:qqp", _template(_QQP, _NO_YES, "not_duplicate", "duplicate")
        ),
        Benchmark("record", "aps/super_glue:record", _record),
        Benchmark(
            "rte", "aps/super_glue:rte", _template(_RTE, _YES_NO, "entailment", "not_entailment")
        ),
        Benchmark("squad", "rajpurkar/squad", _squad),
        Benchmark("sst2", "nyu-mll/glue:sst2", _sst2),
        Benchmark("wic", "aps/super_glue:wic", _template(_WIC, _NO_YES, "no", "yes")),
        Benchmark("winogrande", "allenai/winogrande:winogrande_debiased", _winogrande),
        Benchmark(
            "wnli", "nyu-mll/glue:wnli", _pair(*_WNLI, _NO_YES, "not_entailment", "entailment")
        ),
        Benchmark("wsc", "aps/super_glue:wsc.fixed", _wsc),
    )
}


def benchmark_of(name: str) -> Benchmark:
    """Look up a benchmark by name."""
    if name not in BENCHMARKS:
        raise OptionError(
            "task", repr(name), f"one of {', '.join(BENCHMARKS)}", "pass one of these"
        )
    return BENCHMARKS[name]


def benchmark_rows(
    benchmark: Benchmark,
    directory: Path | None,
    *,
    train: int = 1000,
    dev: int = 500,
    test: int = 1000,
    seed: int,
) -> dict[str, Rows]:
    """Read a benchmark and sample its parts: rows to train on, other rows of the training file, and
    those to test on.

    The numbers are the most rows of each part; the defaults are MeZO's.
    """
    training = _questions(benchmark, directory, ("train",))
    held_out = _questions(benchmark, directory, _HELD_OUT)
    count = len(training)
    order = shuffled(len(training), f"train {seed}")
    others = dev if train + dev <= count else min(dev, max(count // 4, count - train))
    most = min(train, count - others)
    chosen = {"train": order[:most], "dev": order[most : most + others]}
    parts = {name: [training[index] for index in indices] for name, indices in chosen.items()}
    return {
        **parts,
        "test": [
            held_out[index] for index in sorted(shuffled(len(held_out), f"test {seed}")[:test])
        ],
    }


def with_demonstrations(
    rows: Sequence[dict[str, Any]], train: Sequence[dict[str, Any]], shots: int
) -> Rows:
    """Prefix the prompts of rows with the first training rows and their answers, for in-context
    learning.
    """
    require_whole("shots", shots, 1, len(train))
    demonstrations = "".join(row["prompt"] + _answer(row) + _SEPARATOR for row in train[:shots])
    return [{**row, "prompt": demonstrations + row["prompt"]} for row in rows]


def _answer(row: dict[str, Any]) -> str:
    if "completion" in row:
        return str(row["completion"]).rstrip("\n")
    answer = row["answer"]
    return str(row["candidates"][answer[0] if isinstance(answer, list) else answer])


def _questions(benchmark: Benchmark, directory: Path | None, names: Sequence[str]) -> Rows:
    path = _file(benchmark, directory, names)
    questions = Rows()
    for number, row in parsed_rows(path):
        with at_row(path, number):
            try:
                questions += benchmark.questions(row)
            except (KeyError, TypeError, AttributeError, IndexError) as error:
                found = f"a row that cannot be read ({type(error).__name__}: {error})"[:200]
                expected = (
                    f"a row of {benchmark.name}, in the benchmark's own format or that of datasets"
                )
                raise row_error(
                    found, expected, "download the file again, or pass another task"
                ) from error
    return questions


def _file(benchmark: Benchmark, directory: Path | None, names: Sequence[str]) -> Path:
    """The first file of one of these names in a directory; without a directory, the split of the
    first name on the hub.
    """
    if directory is None:
        return Path(f"{benchmark.hub}:{names[0]}")
    paths = [path for name in names if (path := directory / f"{name}.jsonl").exists()]
    if not paths:
        expected = (
            f"{benchmark.name} as JSONL, in one of {', '.join(f'{name}.jsonl' for name in names)}"
        )
        remedy = "check the directory, or leave it out to download the rows from the hub"
        raise DataError(directory, f"no {names[0]}.jsonl", expected, remedy)
    return paths[0]
