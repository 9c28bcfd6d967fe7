"""Small real tokenizers and chat templates, built here, for the tests of templates and encoding."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "system user assistant tool Hello there, what is the sum of two numbers? It is four.\n",
    "You are a helpful assistant.\n The answer is the answer  is  the   answer.\n\n",
]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As SmolLM2's: no markers, and a system message of its own where the row has none.
DEFAULT_SYSTEM = (
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The prompt opens a think block, and so does every assistant turn.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{{ '<think>\n' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
THINKING_MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ '<think>\n' + m['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# As Qwen3's: thinking is shown in the last turn only.
STRIPPING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if loop.last %}{{ m['content'] }}{% else %}{{ m['content'].split('</think>')[-1] }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + CHATML
NO_END = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
# As Phi-3's: one more token closes the conversation, and goes away when it goes on.
CLOSED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ eos_token }}{% endif %}"
)
# The whole turn is marked, header and all: the marks of two turns in a row run into each other.
MARKED_WHOLE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ '<|im_start|>assistant\n' + m['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson + '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for c in m.get('tool_calls', []) %}"
    "{{ '<tool_call>' + c.function.name + ' ' + (c.function.arguments | tojson) + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _wrap(backend: Tokenizer, template: str | None, **options) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>", pad_token="<eos>", **options
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer


@cache
def _byte_level_json(trim_offsets: bool) -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 20, trainer)
    return backend.to_str()


def byte_level(template: str | None = CHATML, *, adds_bos: bool = False, trim_offsets: bool = True, **options):
    """Byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM2."""
    backend = Tokenizer.from_str(_byte_level_json(trim_offsets))
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return _wrap(backend, template, **options)


@cache
def _metaspace_json(scheme: str) -> str:
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if scheme == "normalizer":  # as Llama 2: every stretch of text between special tokens starts with a space
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace()
    alphabet = sorted(
        {*"".join(CORPUS), *'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789<>/|_+=?{}":,'}
    )
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=[*alphabet, "▁"], show_progress=False
    )
    backend.train_from_iterator(CORPUS * 20, trainer)
    return backend.to_str()


def metaspace(template: str | None = CHATML, scheme: str = "first", **options):
    """SentencePiece-like BPE, where a space is part of the word after it."""
    return _wrap(Tokenizer.from_str(_metaspace_json(scheme)), template, **options)


def word_level(template: str | None, words: list[str], **options):
    """One token a word; a line break is the word NL."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace("\n", " NL ")
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _wrap(backend, template, **options)


def chat(*turns: str, **fields):
    """A messages row of alternating user and assistant contents."""
    messages = [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(turns)]
    return {"messages": messages, **fields}


def trained(tokenizer, datum):
    """The text of each stretch of consecutive trained targets."""
    targets, weights = datum.loss_fn_inputs["target_tokens"].tolist(), datum.loss_fn_inputs["weights"].tolist()
    stretches, open_ = [], False
    for target, weight in zip(targets, weights, strict=True):
        if weight and not open_:
            stretches.append([])
        if weight:
            stretches[-1].append(target)
        open_ = bool(weight)
    return [tokenizer.decode(ids) for ids in stretches]
