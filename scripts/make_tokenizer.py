"""Train the tokenizer of the tiny model and write it to recipes/demo/tokenizer.

    python -m scripts.make_tokenizer

Byte-level BPE, so any text can be encoded and decoded again, with every digit a token of its own. The merges come from
texts of this repository: the licence (English) and the demo's chats. The padding token is distinct from the end token.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from scripts.make_demo_data import DEMO, demo_rows

LICENSE = DEMO.parents[1] / "LICENSE"
VOCABULARY = 512
PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant", "tool")

# ChatML. The markers cover what the model itself writes, the end token included; the line break after it is not learnt.
# Tools are listed in a turn of their own before the messages, calls follow the content of the assistant turn.
CHAT_TEMPLATE = """\
{%- macro turn(role, content) -%}
{{ '<|im_start|>' + role + '\\n' + content + '<|im_end|>\\n' }}
{%- endmacro -%}
{%- macro call(item) -%}
{%- set function = item.function if item.function else item -%}
{%- set arguments = function.arguments -%}
{{ '<tool_call>' + ({'name': function.name} | tojson)[:-1] + ', "arguments": ' -}}
{{ (arguments if arguments is string else arguments | tojson) + '}</tool_call>' }}
{%- endmacro -%}
{%- if tools -%}
{{ turn('tools', tools | tojson) }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ '<|im_start|>assistant\\n' }}
{%- generation -%}
{{ message.content or '' }}
{%- for item in message.tool_calls or [] -%}{{ call(item) }}{%- endfor -%}
{{ '<|im_end|>' }}
{%- endgeneration -%}
{{ '\\n' }}
{%- elif message.role in ['system', 'user', 'tool'] -%}
{{ turn(message.role, message.content) }}
{%- else -%}
{{ raise_exception('role ' + message.role + ': accepted are system, user, assistant, tool') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train the tokenizer; the same each time."""
    bytes_of_text = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_of_text])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(bytes_of_text.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        model_max_length=2048,
        chat_template=CHAT_TEMPLATE,
    )


def _texts() -> Iterator[str]:
    yield LICENSE.read_text(encoding="utf-8")
    for row in demo_rows()[0]:
        for message in row["messages"]:
            yield f"{message['role']}\n{message['content']}"
    # Rare in the texts above, but every conversation pays for them.
    for role in ROLES:
        yield f"{role}\n" * 100


def main() -> None:
    """Write the tokenizer's folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=DEMO / "tokenizer", help="folder to write")
    folder: Path = parser.parse_args().out
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
