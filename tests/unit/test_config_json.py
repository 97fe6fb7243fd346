"""A model's config.json: every field with a wrong type, out of range, twice or contradicted is one message."""

import json
from pathlib import Path
from typing import Any

import pytest

from quads.errors import UserError
from quads.model.config import ModelConfig, load_config
from quads.model.config_json import FLAGS, NUMBERS, OPTIONAL_SIZES, SIZES

CONFIG = ModelConfig(
    vocab_size=512,
    hidden_size=64,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    moe_intermediate_size=64,
    num_experts=8,
    top_k=2,
    rope_theta=1e4,
    eos_token_ids=(0,),
)
# What other writers have put there: {one field replaced}.
WRONG_FIELDS = [
    {"rms_norm_eps": "1e-6"},
    {"rms_norm_eps": None},
    {"rms_norm_eps": -1.0},
    {"rms_norm_eps": 0},
    {"head_dim": "32"},
    {"head_dim": 32.0},
    {"head_dim": 0},
    {"rope_scaling": [1]},
    {"rope_scaling": "yarn"},
    {"rope_theta": None},
    {"rope_theta": float("nan")},
    {"norm_topk_prob": "false"},
    {"norm_topk_prob": 1},
    {"tie_word_embeddings": "false"},
    {"tie_word_embeddings": None},
    {"eos_token_id": "0"},
    {"eos_token_id": True},
    {"eos_token_id": [0, True]},
    {"eos_token_id": 512},
    {"eos_token_id": -1},
    {"vocab_size": True},
    {"vocab_size": 2**40},
    {"num_hidden_layers": True},
    {"num_hidden_layers": 10**18},
    {"max_position_embeddings": "long"},
    {"hidden_act": None},
    {"quantization_config": 0},
    {"mlp_only_layers": 0},
    {"attention_dropout": False},
]
# No quantity of config.json takes any of these, but for what `harmless` says.
NEVER_RIGHT: tuple[Any, ...] = (
    "",
    "x",
    "1",
    [],
    [[]],
    {},
    {"a": {}},
    -1,
    -0.5,
    0.5,
    1e308,
    10**30,
    float("inf"),
    float("nan"),
)
OTHERS = ("eos_token_id", "rope_scaling", "rope_parameters", "hidden_act", "decoder_sparse_step", "attention_dropout")


def written(folder: Path, **fields: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**CONFIG.to_hf(), **fields}))
    return folder


@pytest.mark.parametrize("fields", WRONG_FIELDS, ids=str)
def test_a_wrong_field_is_named_with_file_and_value(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(UserError) as refused:
        load_config(written(tmp_path, **fields))
    ((name, value),) = fields.items()
    message = str(refused.value)
    assert message.startswith(f"{tmp_path}/config.json: {name} ") and json.dumps(value) in message
    assert len(message.splitlines()) == 1


def harmless(name: str, value: Any) -> bool:
    """Values of NEVER_RIGHT that are right for this field after all."""
    return (
        (name == "eos_token_id" and value == [])
        or (name in ("rope_scaling", "rope_parameters") and value == {})
        or (name == "rms_norm_eps" and value == 0.5)
        or (name == "rope_theta" and value == 0.5)
    )


@pytest.mark.parametrize("name", [*SIZES, *OPTIONAL_SIZES, *NUMBERS, *FLAGS, *OTHERS])
def test_no_field_takes_what_it_cannot_mean_and_none_gives_a_traceback(tmp_path: Path, name: str) -> None:
    for value in (*NEVER_RIGHT, 0, True) if name not in (*FLAGS, *OTHERS) else NEVER_RIGHT:
        written(tmp_path, **{name: value})
        if harmless(name, value):
            load_config(tmp_path)
            continue
        with pytest.raises(UserError, match=name) as refused:
            load_config(tmp_path)
        assert len(str(refused.value)) < 400, value


def test_fields_that_say_the_same_or_nothing_load(tmp_path: Path) -> None:
    same: list[dict[str, Any]] = [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"rope_scaling": None, "rope_parameters": None},
        {"rope_scaling": {"type": "default", "factor": None}},
        {"num_local_experts": 8},
        {"dtype": "bfloat16", "torch_dtype": "bfloat16"},
        {"quantization_config": None, "mlp_only_layers": None},
        {"rope_theta": 10000},  # a whole number is a number
        {"eos_token_id": [0]},
    ]
    for fields in same:
        assert load_config(written(tmp_path, **fields)) == ModelConfig.from_hf(CONFIG.to_hf()), fields
    assert load_config(written(tmp_path, head_dim=None)).head_dim == 64 // 2
    nested = {k: v for k, v in CONFIG.to_hf().items() if k not in ("rope_theta", "num_experts")}
    nested |= {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "num_local_experts": 4}
    found = ModelConfig.from_hf(nested)  # as transformers 5 writes them
    assert (found.rope_theta, found.num_experts) == (5e5, 4)


def test_one_quantity_under_two_names_must_be_one_value(tmp_path: Path) -> None:
    contradictions: dict[str, dict[str, Any]] = {
        "rope_theta = 1000000.0 contradicts rope_parameters.rope_theta = 10000.0": {
            "rope_theta": 1e6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        "rope_theta = 10000.0 contradicts rope_scaling.rope_theta = 5.0": {"rope_scaling": {"rope_theta": 5.0}},
        "num_experts = 8 contradicts num_local_experts = 4": {"num_local_experts": 4},
        'torch_dtype = "float32" contradicts dtype = "bfloat16"': {"torch_dtype": "float32", "dtype": "bfloat16"},
    }
    for message, fields in contradictions.items():
        with pytest.raises(UserError, match=message):
            load_config(written(tmp_path, **fields))


@pytest.mark.parametrize(
    "table",
    [
        {"rope_type": "yarn", "factor": 4.0},
        {"type": "linear", "factor": 2.0},
        {"rope_type": "default", "type": "yarn"},
        {"rope_type": "default", "factor": 8.0},
        {"rope_type": 1},
        {"partial_rotary_factor": 0.5},
        {"partial_rotary_factor": True},
        {"full_attention": {"rope_theta": 1e4}},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_positions_that_are_rotated_otherwise_are_refused(tmp_path: Path, name: str, table: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"config.json: {name}\.\w+ = .* is not supported"):
        load_config(written(tmp_path, **{name: table}))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "nested too deep"),
        ('{"a": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ("[]", r"does not hold a JSON object, but \[\]"),
        ('{"rope_theta": 1.0, "rope_theta": 2.0}', r'the key "rope_theta" has two values, 1.0 and 2.0'),
        ('{"a": {"b": 1, "b": true}}', r'the key "b" has two values, 1 and true'),
    ],
    ids=["cut", "deep", "long number", "list", "doubled", "doubled inside"],
)
def test_a_file_that_is_no_object(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=f"config.json.*{says}"):
        load_config(tmp_path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(UserError, match="config.json is not valid JSON"):
        load_config(tmp_path)


def test_a_key_given_twice_with_one_value_loads(tmp_path: Path) -> None:
    text = json.dumps(CONFIG.to_hf())
    (tmp_path / "config.json").write_text('{"rope_theta": 10000.0, ' + text[1:])
    assert load_config(tmp_path).rope_theta == 1e4


def test_how_fields_bind_each_other_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path}/config.json: .*num_attention_heads must be a multiple"):
        load_config(written(tmp_path, num_attention_heads=3, num_key_value_heads=2))
