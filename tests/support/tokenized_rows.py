"""A tokenizer with a chat template, as rows of data are tokenized with, and the text of a row."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from zo2adapters.tasks.rows import TokenizedRow

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|think|>"]
ASK = {"role": "user", "content": "What colour is the sky?"}
ANSWER = {"role": "assistant", "content": "It is blue."}


def make_tokenizer(*, wrap: str = "$A", template: str | None = TEMPLATE, **special: str | None) -> PreTrainedTokenizerBase:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["The sky is blue. What colour is the sky? It is blue."] * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(single=wrap, special_tokens=[("<s>", 1), ("</s>", 2)])
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"} | special
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)  # type: ignore[no-untyped-call]
    tokenizer.chat_template = template
    return tokenizer


TOKENIZER = make_tokenizer()


def text_of(row: TokenizedRow, start: int = 0, tokenizer: PreTrainedTokenizerBase = TOKENIZER) -> str:
    text = tokenizer.decode(list(row.input_ids)[start:])
    assert isinstance(text, str)
    return text
