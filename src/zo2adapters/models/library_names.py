"""Names inside transformers, peft and TRL that their releases may change.

What can be found by what it is, such as an argument by its type, is found so. Other names are
imported and looked up within ``names_of``: a release without one of them is refused by its version
before anything is opened, instead of in the middle of a run, or never.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

from torch import nn
from transformers import AutoModelForCausalLM, Cache, PretrainedConfig, PreTrainedModel

from zo2core.errors import MissingPackageError

# The oldest and the newest release that ``make test-oldest`` and ``make test-newest`` install.
TESTED: Mapping[str, tuple[str, str]] = {
    "accelerate": ("1.15.0", "1.15.0"),
    "peft": ("0.20.0", "0.21.2"),
    "transformers": ("5.17.0", "5.24.0"),
    "trl": ("1.16.0", "1.16.0"),
}


@contextmanager
def names_of(package: str) -> Iterator[None]:
    """A context in which names of a package are imported that a release of it may lack.

    Raises:
        MissingPackageError: if the installed release lacks one.
    """
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise _lacking(package, str(error).partition(" (")[0]) from error


def require_attributes(owner: Any, *names: str) -> None:
    """Refuse a release of a package in whose class, module or object an attribute is missing.

    Raises:
        MissingPackageError: if one is missing.
    """
    module, _, name = f"{getattr(owner, '__module__', '')}.{_name_of(owner)}".rpartition(".")
    for attribute in names:
        if not hasattr(owner, attribute):
            raise _lacking(f"{module}.{name}".strip(".").partition(".")[0], f"{name}.{attribute}")


def _name_of(owner: Any) -> str:
    name: str = getattr(owner, "__name__", type(owner).__name__)
    return name


def _lacking(package: str, what: str) -> MissingPackageError:
    oldest, newest = TESTED[package]
    return MissingPackageError(
        f"{package} {importlib.metadata.version(package)}",
        f"a release without a name that is needed ({what})",
        f"one from {oldest} to {newest}, with which zo2core is tested",
        f"pip install '{package}=={newest}'",
    )


with names_of("transformers"):
    from transformers import core_model_loading as core_model_loading
    from transformers.cache_utils import DynamicLayer as DynamicLayer
    from transformers.conversion_mapping import (
        get_model_conversion_mapping as get_model_conversion_mapping,
    )
    from transformers.core_model_loading import WeightConverter as WeightConverter
    from transformers.core_model_loading import WeightRenaming as WeightRenaming
    from transformers.core_model_loading import build_glob_alternation as build_glob_alternation
    from transformers.core_model_loading import dot_natural_key as dot_natural_key
    from transformers.core_model_loading import rename_source_key as rename_source_key
    from transformers.loss.loss_utils import ForCausalLMLoss as ForCausalLMLoss
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS as TENSOR_PROCESSORS
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor as TensorProcessor
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS as ROPE_INIT_FUNCTIONS
    from transformers.pytorch_utils import Conv1D as Conv1D
    from transformers.utils import chat_template_utils
    from transformers.utils.output_capturing import OutputRecorder as OutputRecorder

require_attributes(AutoModelForCausalLM, "_model_mapping", "from_config")
require_attributes(PretrainedConfig, "_attn_implementation", "attribute_map", "sub_configs")
require_attributes(
    PreTrainedModel,
    *("_get_dtype_plan", "_keys_to_ignore_on_load_unexpected", "base_model_prefix"),
    *("initialize_weights", "loss_function"),
)
require_attributes(WeightConverter, "add_tensor", "convert")
require_attributes(chat_template_utils, "datetime", "render_jinja_template")


def cache_argument(model: nn.Module) -> str | None:
    """The argument of a model's forward for a cache of keys and values; None: it takes none.

    It is known by its type. Where the forward itself does not say so, a module in it does.
    """
    kinds: list[Any] = list(dict.fromkeys(map(type, model.modules())))
    of_model, *inner = (inspect.signature(kind.forward).parameters for kind in kinds)
    declared = {
        name
        for parameters in (of_model, *inner)
        for name, parameter in parameters.items()
        if any(map(_is_cache, (parameter.annotation, *get_args(parameter.annotation))))
    }
    return next((name for name in of_model if name in declared), None)


def _is_cache(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Cache)
