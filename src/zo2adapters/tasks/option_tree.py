"""What is declared of an option beside its field: where it stands in recipes, when it may change,
with which methods it has an effect, and its range.

An option is a field of a frozen dataclass whose type is marked by an ``Option``. Dataclasses may
be groups of other ones. Command lines, recipes, help, refusals and the table of the docs follow
from them.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from zo2core.errors import OptionError
from zo2core.ranges import (
    LARGEST_WHOLE,
    OF_ADAPTERS,
    OptimizerName,
    parse_size,
    require_number,
    require_whole,
)

MethodName: TypeAlias = Literal[
    "lora", "lora+lomo", "adamw", "sgd", "lomo", "adalomo", "badam", "mezo", "zeroth-order"
]
BOTH: MethodName = "lora+lomo"  # trains an adapter and the base under it
ZEROTH_ORDER: tuple[MethodName, ...] = ("mezo", "zeroth-order")


MOST_ROWS = 1 << 16  # largest batch: each row is a Python object, however much memory there is
MOST_QUERIES = 1 << 16


class Change(Enum):
    """When an option of a run may change."""

    NEVER = "fixed at the start"
    BRANCH = "may change in a branch"
    RESUME = "may change at a resume, and in a branch"
    MOVED = "path of what the run has a digest of, and may have moved"
    CALL = "belongs to the command, and is not saved with the run"


class Effect(NamedTuple):
    """With which methods an option has an effect."""

    needs: str  # for messages
    methods: tuple[MethodName, ...]
    beside_adapter: tuple[MethodName, ...] | None = None  # those that train one; None: the same

    def applies(self, method: MethodName, *, trains_adapter: bool) -> bool:
        """Whether the option has an effect on a run."""
        beside = self.methods if self.beside_adapter is None else self.beside_adapter
        return method in (beside if trains_adapter else self.methods)


_METHODS: tuple[MethodName, ...] = get_args(MethodName)
_OF_ALL: tuple[MethodName, ...] = (*get_args(OptimizerName), BOTH)  # by gradients
_OF_ADAPTERS: tuple[MethodName, ...] = ("lora", *OF_ADAPTERS, *ZEROTH_ORDER)
ANY = Effect("any method", _METHODS)
ZEROTH = Effect("--method zeroth-order or mezo", ("zeroth-order", "mezo"))
ESTIMATED = Effect("--method zeroth-order", ("zeroth-order",))
GRADIENTS = Effect("a first-order --method", ("lora", *_OF_ALL))
FULL = Effect("a first-order --method of all parameters", _OF_ALL, (BOTH,))
FULL_AT_ONCE = Effect(
    "a first-order --method of all parameters but badam",
    tuple(name for name in _OF_ALL if name != "badam"),
    (BOTH,),
)
WRITES = Effect("a method that changes the weights", _METHODS, (BOTH,))
WRITES_BACK = Effect("zeroth-order steps of all parameters", ZEROTH_ORDER, ())
TRANSFERS = Effect("--method zeroth-order and no adapter", ("zeroth-order",), ())
SNAPSHOTS = Effect("a method that takes snapshots", _METHODS, ("lora", *OF_ADAPTERS, BOTH))
ADAMW = Effect("--method lora, lora+lomo or adamw", ("lora", BOTH, "adamw"))
FULL_ADAMW = Effect("--method adamw and no adapter", ("adamw",), ())
SGD = Effect("--method sgd", ("sgd",))
BADAM = Effect("--method badam", ("badam",))
OF_BOTH = Effect(f"--method {BOTH}", (BOTH,))
ADAPTERS = Effect("a --method that trains an adapter, such as lora", (*_OF_ADAPTERS, BOTH))
ADAPTERS_ALONE = Effect("a --method that trains an adapter alone, such as lora", _OF_ADAPTERS)


Section: TypeAlias = Literal[
    "model", "data", "method", "schedule", "memory", "evaluation", "output"
]
SECTIONS: tuple[Section, ...] = get_args(Section)  # of a recipe, in order
Check: TypeAlias = Callable[[str, Any], None]  # of an option's name and value; it refuses


class Option(NamedTuple):
    """What is declared of an option beside its type, default and docstring: a mark of its field."""

    section: Section  # of a recipe
    change: Change = Change.NEVER
    effect: Effect = ANY
    check: Check | None = None  # refuses values out of range
    unchecked: tuple[object, ...] = (None, "auto", "never")  # values that are in no range
    # options beside one of which alone it has an effect; name=value if it needs this value, which
    # a colon and more may follow, as in cuda:1
    needs: tuple[str, ...] = ()
    # options that it excludes, and what it needs instead of each
    excludes: Mapping[str, str] = MappingProxyType({})
    untried: str = ""  # why trials of learning rates do not have it; empty: they have it
    is_shared: bool = False  # whether several runs of one base have it in common
    decides: bool = False  # whether effects of other options depend on it
    elsewhere: tuple[str, ...] = ()  # what other trainers call it
    library: tuple[str, ...] = ()  # what the library's errors and journals call it


class Refusal(NamedTuple):
    """A row of what is refused: a condition, and what is said if it holds."""

    holds: bool
    option: str
    found: str
    expected: str
    remedy: str = "leave one of the two out"


def refuse(*rows: Refusal) -> None:
    """Refuse the first of these that holds."""
    for row in rows:
        if row.holds:
            raise OptionError(row.option, row.found, row.expected, row.remedy)


def whole(least: int, most: int = LARGEST_WHOLE, otherwise: str = "") -> Check:
    """A check of a whole number."""
    return partial(require_whole, least=least, most=most, otherwise=otherwise)


def number(
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
    remedy: str = "pass such a number",
) -> Check:
    """A check of a finite number."""
    return partial(require_number, above=above, least=least, below=below, most=most, remedy=remedy)


def size(option: str, value: int | str) -> None:
    """Refuse what is no number of bytes."""
    parse_size(value, option=option)


def rates(option: str, value: float | tuple[float, ...]) -> None:
    """Refuse rates that are not from 0 to below 1."""
    for rate in value if isinstance(value, tuple) else (value,):
        require_number(option, rate, least=0, below=1)


class Declared(NamedTuple):
    """An option as its dataclass declares it."""

    owner: type
    name: str
    type: Any  # without marks
    default: Any  # MISSING: it is required; of options with values, the value
    marks: tuple[Any, ...]

    @property
    def option(self) -> Option | None:
        """What is declared beside the field; None: it is no option of a run."""
        return next((mark for mark in self.marks if isinstance(mark, Option)), None)


@cache
def _hints(owner: type) -> Mapping[str, Any]:
    return get_type_hints(owner, include_extras=True)


def declared(options: Any) -> Iterator[Declared]:
    """Each option of a dataclass, also in its groups; of options with values these are the
    defaults.
    """
    owner = options if isinstance(options, type) else type(options)
    hints = _hints(owner)
    for field in fields(options):
        if field.default_factory is not MISSING:
            yield from declared(field.default_factory())
            continue
        hint = hints[field.name]
        kind, *marks = get_args(hint) if get_origin(hint) is Annotated else [hint]
        default = getattr(options, field.name, MISSING)
        yield Declared(owner, field.name, kind, default, tuple(marks))


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """The types of which a value of this type is one."""
    return get_args(hint) if get_origin(hint) in {Union, UnionType} else (hint,)


def named_values(hint: Any) -> dict[str, Any]:
    """The values of a type that have a name, such as those of an enumeration."""
    names = dict[str, Any]()
    for kind in kinds_of(hint):
        if get_origin(kind) is Literal:
            names |= {str(value): value for value in get_args(kind)}
        elif isinstance(kind, type) and issubclass(kind, Enum):
            names |= {str(member.value): member for member in kind}
    return names


@cache
def docstrings(options: type) -> Mapping[str, str]:
    """The docstring below each field of a dataclass, also of its bases, by the field's name."""
    texts: dict[str, str] = {}
    for base in reversed(options.__mro__):
        texts |= dict(_docstrings(base)) if is_dataclass(base) else {}
    return texts


def _docstrings(options: type) -> Iterator[tuple[str, str]]:
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(options))).body
    assert isinstance(definition, ast.ClassDef)
    for field, docstring in itertools.pairwise(definition.body):
        match field, docstring:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(text))
            ):
                yield name, inspect.cleandoc(text)


def leaves(options: object) -> Iterator[tuple[str, Any, Any]]:
    """Name, value and default of each option, also in groups."""
    for option in fields(options):  # type: ignore[arg-type]
        value = getattr(options, option.name)
        if is_dataclass(value):
            yield from leaves(value)
        else:
            yield option.name, value, option.default


def filled(options: Any, values: Mapping[str, Any]) -> Any:
    """The options with these values, also in groups; a class is made with them."""
    is_new = isinstance(options, type)
    given = dict[str, Any]()
    for option in fields(options):
        if option.default_factory is not MISSING:
            group = option.default_factory() if is_new else getattr(options, option.name)
            given[option.name] = filled(group, values)
        elif option.name in values:
            given[option.name] = values[option.name]
    return options(**given) if is_new else replace(options, **given)


def flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """The values of options as JSON by name, also those in groups."""
    listed = (
        (flat(value) if isinstance(value, dict) else {name: value})
        for name, value in options.items()
    )
    return {name: value for values in listed for name, value in values.items()}


def is_met(need: str, values: Mapping[str, Any], there: Collection[str]) -> bool:
    """Whether options meet a need of another one.

    Args:
        need: See ``Option.needs``.
        values: The options by name.
        there: Names of those that were not left out.
    """
    name, _, value = need.partition("=")
    given = str(plain(values.get(name)))
    return f"{given}:".startswith(f"{value}:") if value else name in there


def flag(name: str) -> str:
    """An option as it is written on the command line, also with a value, as in name=value."""
    name, _, value = name.partition("=")
    return f"--{name.replace('_', '-')} {value}".rstrip()


def plain(value: object) -> Any:
    """An option's value as a recipe has it: a text, a number, a bool, None, or a list of several
    texts or numbers.
    """
    if isinstance(value, tuple):
        return value[0] if len(value) == 1 else list(value)
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def as_written(value: object) -> str:
    """An option's value as it is written on the command line, or none."""
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else _lowered(plain(value))


def _lowered(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def shown(value: object) -> str:
    """An option's value in a message."""
    if value is True:
        return "on"
    texts = value if isinstance(value, tuple) else [plain(value)]
    return " ".join(map(str, texts))
