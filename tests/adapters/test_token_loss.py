"""The loss of next tokens in the cache: transformers' bits, and its own function elsewhere."""

from typing import Any

import pytest
import torch
from models import save_model, small_config
from profiles import each_choice
from transformers.loss.loss_utils import ForCausalLMLoss

from zo2adapters import open_checkpoint
from zo2adapters.models import token_loss
from zo2adapters.models.token_loss import causal_lm_loss

WORDS = 70
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Words of the rows that pass through the cache, a few at a time."""
    computed: list[int] = []
    whole = token_loss._log_softmax

    def counted(logits: torch.Tensor) -> torch.Tensor:
        computed.append(logits.shape[1])
        return whole(logits)

    monkeypatch.setattr(token_loss, "_log_softmax", counted)
    monkeypatch.setattr(token_loss, "SMALL", 0)
    monkeypatch.setattr(token_loss, "_CACHED", 3 * WORDS)
    return computed


def outcome(
    loss: Any, logits: torch.Tensor, factor: float, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and its gradient."""
    logits = logits.clone().requires_grad_()
    value = loss(logits, vocab_size=WORDS, **options)
    [gradient] = torch.autograd.grad(value, logits, torch.full_like(value, factor))
    return value, gradient


@pytest.mark.parametrize(
    ("dtype", "divisor", "ignored", "is_shifted", "factor"),
    each_choice(DTYPES, [None, 5, torch.tensor(7)], [0, 3, 22], [False, True], [1.0, 0.3]),
)
def test_the_loss_and_its_gradient_are_transformers(
    dtype: torch.dtype,
    divisor: Any,
    ignored: int,
    is_shifted: bool,
    factor: float,
    calls: list[int],
) -> None:
    generator = torch.Generator().manual_seed(ignored)
    logits = 4 * torch.randn(2, 11, WORDS, generator=generator).to(dtype)
    labels = torch.randint(0, WORDS, (2, 11), generator=generator)
    labels.view(-1)[:ignored] = -100
    options: dict[str, Any] = {"labels": labels, "num_items_in_batch": divisor}
    if is_shifted:
        options |= {"labels": None, "shift_labels": labels}
    expected = outcome(ForCausalLMLoss, logits, factor, options)
    assert not calls
    results = outcome(causal_lm_loss, logits, factor, options)
    assert calls == [WORDS] * 2 * 8, "twice 22 rows, three at a time"
    for value, of_transformers in zip(results, expected, strict=True):
        assert value.dtype is of_transformers.dtype
        torch.testing.assert_close(value, of_transformers, rtol=0, atol=0, equal_nan=True)


def test_a_word_that_stands_for_tokens_without_a_label_is_no_label(calls: list[int]) -> None:
    logits = torch.randn(2, 5, WORDS)
    options = {"labels": torch.tensor([[0, 3, 0, 4, 5], [1, 0, 2, 2, 0]]), "ignore_index": 0}
    expected = outcome(ForCausalLMLoss, logits, 1.0, options)
    for value, of_transformers in zip(
        outcome(causal_lm_loss, logits, 1.0, options), expected, strict=True
    ):
        assert torch.equal(value, of_transformers)


@pytest.mark.parametrize("case", ["another option", "another vocabulary", "not contiguous"])
def test_other_losses_are_transformers_own(case: str, calls: list[int]) -> None:
    logits = torch.randn(2, 5, WORDS)
    labels = torch.randint(0, WORDS, (2, 5))
    words = 2 * WORDS if case == "another vocabulary" else WORDS
    options: dict[str, Any] = {"weight": None} if case == "another option" else {}
    if case == "not contiguous":
        logits = logits.transpose(0, 1).contiguous().transpose(0, 1)
        with pytest.raises(RuntimeError, match="view size"):
            causal_lm_loss(logits, labels, words)
    elif words != WORDS:
        with pytest.raises(ValueError, match="batch_size"):
            causal_lm_loss(logits, labels, words)
    else:
        value = causal_lm_loss(logits, labels, words, **options)
        assert torch.equal(value, ForCausalLMLoss(logits, labels, words))
    assert not calls


@pytest.mark.parametrize("label", [WORDS, -1])
def test_a_label_that_is_no_word_is_refused(label: int, calls: list[int]) -> None:
    logits = torch.randn(1, 3, WORDS)
    with pytest.raises(RuntimeError, match="out of bounds"):
        causal_lm_loss(logits, torch.full((1, 3), label), WORDS)


def test_an_opened_model_has_the_loss(tmp_path: Any, calls: list[int]) -> None:
    base = save_model(tmp_path, small_config("llama", vocab_size=WORDS), torch.bfloat16)
    model = open_checkpoint(base, precision="exact")
    assert model.skeleton.loss_function is causal_lm_loss
    assert not model.is_loss_replaced
    model.skeleton.loss_function = ForCausalLMLoss
    assert model.is_loss_replaced
