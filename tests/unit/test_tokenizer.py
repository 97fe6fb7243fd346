"""The tokenizer against transformers, and its errors."""

import json
import shutil
from pathlib import Path

import pytest

from quads.data.tokenizer import Tokenizer
from quads.errors import UserError
from tests.helpers import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "tokenizer"

# What templates on the hub make use of: whitespace control, loop.index0, namespaces, filters, tests, break, tojson,
# string methods, special tokens by name, generation blocks, variables with defaults.
TEMPLATE = """\
{%- set ns = namespace(system=false) %}
{%- if messages[0]['role'] == 'system' %}
    {{- bos_token + '[S]' + messages[0].content | trim + '[/S]\n' }}
    {%- set ns.system = true %}
{%- endif %}
{% for message in messages %}
{%- if message.role == 'user' %}
{{ loop.index0 }}: {{ message['content'].strip() | upper }}{{ eos_token }}
{% elif message.role == 'assistant' %}
{% generation %}{{ message.content.split('</think>')[-1].lstrip('\n') }}{% endgeneration %}{{ eos_token }}
{% elif message.role == 'stop' %}
{% break %}
{% endif %}
{%- endfor %}
{{ {'b': 'ü<&', 'a': [1, 2]} | tojson }} {{ 'yes' if enable_thinking is not defined or enable_thinking else 'no' }}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

CHATS = [
    [{"role": "user", "content": " What is 3 + 4? "}],
    [{"role": "system", "content": " Be brief.\n"}, {"role": "user", "content": "Hi <&> ü"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>x</think>\nb"},
        {"role": "user", "content": "c"},
        {"role": "stop", "content": ""},
        {"role": "user", "content": "never"},
    ],
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = tmp_path / "tokenizer"
    shutil.copytree(EXAMPLE, target)
    return target


def change(file: Path, **values: object) -> None:
    settings = json.loads(file.read_text()) if file.exists() else {}
    settings.update(values)
    file.write_text(json.dumps({name: value for name, value in settings.items() if value is not ...}))


def theirs(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", ["3 + 4 = 7", "", "ü 漢字 \n\t x", "a<|im_end|>b", " lead"])
def test_ids_are_those_of_transformers(text: str) -> None:
    ours, reference = Tokenizer(EXAMPLE), theirs(EXAMPLE)
    assert ours.encode(text) == reference.encode(text, add_special_tokens=False)
    assert ours.encode(text, special_tokens=True) == reference.encode(text)
    assert ours.decode(ours.encode(text)) == reference.decode(reference.encode(text), skip_special_tokens=True)
    assert ours.decode(ours.encode(text), skip_special=False) == text
    assert ours.encode_batch([text, "x"]) == [ours.encode(text), ours.encode("x")]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("generate", [True, False])
def test_chat_template_is_that_of_transformers(folder: Path, chat: list[dict[str, str]], generate: bool) -> None:
    for template in ((EXAMPLE / "chat_template.jinja").read_text(), TEMPLATE):
        (folder / "chat_template.jinja").write_text(template)
        change(folder / "tokenizer_config.json", bos_token="<|endoftext|>")
        ours, reference = Tokenizer(folder), theirs(folder)
        for variables in ({}, {"enable_thinking": False}):
            expected = reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=generate, **variables)
            assert ours.apply_chat_template(chat, add_generation_prompt=generate, **variables) == expected


def test_chat_template_may_stand_in_the_config(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    change(folder / "tokenizer_config.json", chat_template="{{ messages[0].content }}!")
    assert Tokenizer(folder).apply_chat_template(CHATS[0]) == " What is 3 + 4? !"
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}?"}]
    change(folder / "tokenizer_config.json", chat_template=named)
    assert Tokenizer(folder).apply_chat_template(CHATS[0]) == " What is 3 + 4? ?"


def test_all_eos_ids_count(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    end, text_end = tokenizer.token_id("<|im_end|>"), tokenizer.token_id("<|endoftext|>")
    assert tokenizer.eos_ids == (end, text_end)  # generation_config.json
    change(folder / "generation_config.json", eos_token_id=text_end)
    assert Tokenizer(folder).eos_ids == (text_end, end)  # and the EOS token of the tokenizer
    (folder / "generation_config.json").unlink()
    assert Tokenizer(folder).eos_ids == (end,)
    change(folder / "tokenizer_config.json", eos_token={"content": "<|endoftext|>", "special": True})
    assert Tokenizer(folder).eos_ids == (text_end,)
    change(folder / "tokenizer_config.json", eos_token=None)
    change(folder / "config.json", eos_token_id=[7, 8])
    assert Tokenizer(folder).eos_ids == (7, 8)


def test_vocabulary_counts_added_tokens() -> None:
    assert Tokenizer(EXAMPLE).vocab_size == 259  # 256 bytes and three special tokens


def test_truncation_and_padding_of_the_file_are_off(folder: Path) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    data["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {
        "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 256, "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(data))
    assert len(Tokenizer(folder).encode("abcdefghijkl")) == 12
    assert len(Tokenizer(folder).encode("ab")) == 2


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: shutil.rmtree(f), "does not exist"),
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "cannot be read as a tokenizer"),
        (lambda f: (f / "tokenizer_config.json").write_text("{"), "is not valid JSON"),
        (lambda f: (f / "tokenizer_config.json").write_text("[]"), "does not hold a JSON object"),
        (lambda f: change(f / "tokenizer_config.json", eos_token="<nope>"), "'<nope>' .* not in tokenizer.json"),
        (lambda f: change(f / "generation_config.json", eos_token_id=100000), "EOS id 100000 .* not one of its 259"),
        (lambda f: change(f / "generation_config.json", eos_token_id="x"), "must be an id or a list of ids"),
    ],
)
def test_broken_folders(folder: Path, break_it, message: str) -> None:
    break_it(folder)
    with pytest.raises(UserError, match=message):
        Tokenizer(folder)


def test_no_eos_is_an_error(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    change(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(UserError, match="no EOS token, so a response could never stop"):
        Tokenizer(folder)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("", "no chat template"),
        ("{% if %}", "failed"),
        ("{{ raise_exception('only one message, please') }}", "only one message, please"),
        ("{{ messages[7].content }}", "failed"),
        ("{{ messages.append(1) }}", "failed"),  # the sandbox: no change of what is passed in
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "failed"),  # nor a way out of it
        ("{{ undefined_function() }}", "failed"),
    ],
)
def test_template_errors(folder: Path, template: str, message: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match=message):
        Tokenizer(folder).apply_chat_template(CHATS[0])
