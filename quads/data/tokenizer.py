"""Text <-> token ids for any Hugging Face tokenizer folder, with its chat template, without transformers.

A folder holds `tokenizer.json` and, beside it, any of `tokenizer_config.json` (special tokens, chat template),
`chat_template.jinja`, `generation_config.json` (all EOS ids) and `config.json`. Templates are programs of a stranger:
they run in Jinja's immutable sandbox.

Sampled tokens are never decoded and encoded again: the engine's ids are what the learner trains on. `encode` is for
prompts, `decode` is for scorers and for people.
"""

import datetime
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from quads.errors import UserError
from quads.json_file import read_object, show

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Encoder, decoder, EOS ids and chat template of one folder; UserError where a file is missing or broken.

    Example: `Tokenizer("Qwen3-30B-A3B").encode("3 + 4 =")`
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            wrong = "is not a folder" if self.folder.exists() else "does not exist"
            raise UserError(
                f"tokenizer folder {self.folder} {wrong}; set [model] tokenizer or path to one with tokenizer.json"
            )
        file = self.folder / "tokenizer.json"
        if not file.is_file():
            raise UserError(
                f"{self.folder} has no tokenizer.json; set [model] tokenizer to a folder that has one, or save this "
                "one in the fast format"
            )
        try:
            self._fast = FastTokenizer.from_file(str(file))
        except Exception as error:  # the Rust side raises bare Exception
            raise UserError(f"{file} cannot be read as a tokenizer ({error}); copy or save it again") from None
        self._fast.no_truncation()  # some published files switch these on
        self._fast.no_padding()
        settings = _read_json(self.folder / "tokenizer_config.json")
        self.special_tokens = _special_tokens(settings, _read_json(self.folder / "special_tokens_map.json"))
        self.max_tokens = _max_tokens(settings, self.folder)
        self.eos_ids = self._find_eos_ids()
        self.chat_template = _chat_template(self.folder, settings)
        self._template = None

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included. An embedding may have more rows (padding), never fewer."""
        return self._fast.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        """Ids of `text`. special_tokens: also what the tokenizer puts around plain text (a BOS, say)."""
        return self._fast.encode(text, add_special_tokens=special_tokens).ids

    def encode_batch(self, texts: Sequence[str], special_tokens: bool = False) -> list[list[int]]:
        """`encode` of many texts, on several cores."""
        return [encoding.ids for encoding in self._fast.encode_batch(list(texts), add_special_tokens=special_tokens)]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `ids`; special tokens (EOS, padding) are left out unless asked for."""
        return self._fast.decode(list(ids), skip_special_tokens=skip_special)

    def decode_batch(self, ids: Sequence[list[int]]) -> list[str]:
        """`decode` of many, on several cores; other Python threads go on meanwhile."""
        return self._fast.decode_batch(list(ids), skip_special_tokens=True)

    def token_id(self, token: str) -> int | None:
        """Id of one token by its exact text."""
        return self._fast.token_to_id(token)

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a conversation, up to where the model answers; encode it without special tokens.

        variables: what a template may ask for besides, such as `enable_thinking=False`.
        """
        if not self.chat_template:
            raise UserError(f"{self.folder} has no chat template; set [task] chat = false or add chat_template.jinja")
        try:
            if self._template is None:
                self._template = _environment().from_string(self.chat_template)
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
                **variables,
            )
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise UserError(f"chat template of {self.folder} failed: {error}") from None

    def _find_eos_ids(self) -> tuple[int, ...]:
        """generation_config.json first (it may list several), then the EOS token; config.json if both are silent."""
        found = _id_list(_read_json(self.folder / "generation_config.json").get("eos_token_id"))
        token = self.special_tokens.get("eos_token")
        if token is not None:
            token_id = self._fast.token_to_id(token)
            if token_id is None:
                raise UserError(f"EOS token {token!r} of {self.folder} is not in tokenizer.json")
            found.append(token_id)
        found = found or _id_list(_read_json(self.folder / "config.json").get("eos_token_id"))
        if not found:
            raise UserError(
                f"tokenizer {self.folder} has no EOS token, so a response could never stop; "
                "set eos_token in tokenizer_config.json or eos_token_id in generation_config.json"
            )
        for eos_id in found:
            if self._fast.id_to_token(eos_id) is None:
                raise UserError(f"EOS id {eos_id} of {self.folder} is not one of its {self.vocab_size} tokens")
        return tuple(dict.fromkeys(found))


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training masks in some templates; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """What the templates on the hub are written for: trimmed blocks, break/continue, tojson without HTML escapes."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
    ):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _read_json(file: Path) -> dict[str, Any]:
    """The object in `file`, {} when there is no such file."""
    return read_object(file) if file.exists() else {}


def _special_tokens(settings: dict[str, Any], special_map: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... as text. A token is stored as text or as {"content": text, ...}; null means none."""
    tokens = {}
    for name in SPECIAL_NAMES:
        value = settings[name] if name in settings else special_map.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _max_tokens(settings: dict[str, Any], folder: Path) -> int | None:
    """model_max_length: the longest text that the model is meant for, None where nothing is said."""
    value = settings.get("model_max_length")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1:
        raise UserError(
            f"{folder / 'tokenizer_config.json'}: model_max_length is {show(value)}; it must be a number >= 1"
        )
    return int(min(value, 2**63))  # where there is no limit, 1e30 is written


def _id_list(value: Any) -> list[int]:
    """eos_token_id is an id, a list of ids, or null."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**32 for item in values):
        raise UserError(f"eos_token_id must be an id or a list of ids, is {value!r}")
    return list(values)


def _chat_template(folder: Path, settings: dict[str, Any]) -> str:
    """chat_template.jinja wins over tokenizer_config.json; of a list of named templates, `default`."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file} cannot be read: {error}") from None
    value = settings.get("chat_template")
    if isinstance(value, list):
        named = {
            item["name"]: item["template"]
            for item in value
            if isinstance(item, dict) and {"name", "template"} <= item.keys()
        }
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise UserError(f"chat_template in {folder / 'tokenizer_config.json'} must be text or a list")
    return value or ""
