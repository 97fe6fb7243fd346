"""The fields of a Hugging Face config.json that this decoder reads: type and range of each, and what it cannot do.

Checked as strictly as the run's own config, for a file that says `"norm_topk_prob": "false"` means no to its writer and
yes to Python. What stands there under two names must be the same twice. Fields that change no number are not looked at.
"""

import math
from typing import Any

from quads.errors import UserError
from quads.json_file import show

# Lowest and highest value. The highest ones are far beyond any model, so that sizes of tensors fit 64 bits and the
# memory estimate, not a long loop, refuses what is too large.
SIZES = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**20),
    "num_hidden_layers": (1, 2**12),
    "num_attention_heads": (1, 2**15),
    "num_key_value_heads": (1, 2**15),
    "moe_intermediate_size": (1, 2**20),
    "num_experts": (1, 2**15 - 1),  # engines return expert choices as int16
    "num_experts_per_tok": (1, 2**15 - 1),
}
OPTIONAL_SIZES = {
    "head_dim": (1, 2**16),
    "max_position_embeddings": (1, 2**31 - 1),
    "decoder_sparse_step": (1, 2**31 - 1),
}
NUMBERS = {"rope_theta": 1e15, "rms_norm_eps": 1.0}  # above 0, up to this
FLAGS = ("norm_topk_prob", "tie_word_embeddings", "attention_bias", "use_sliding_window")
MAY_BE_NULL = {"head_dim"}  # null and absent mean the same to transformers
TWO_NAMES = (("num_experts", "num_local_experts"), ("torch_dtype", "dtype"))  # transformers 4 and 5
ROPE_FIELDS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def checked_fields(raw: dict[str, Any], where: str, model_types: list[str]) -> dict[str, Any]:
    """`raw` with every quantity under its first name, once all that is read of it has its type and range.

    `rope_theta` is filled in from rope_parameters, num_experts from num_local_experts. `where` names the file.

    Raises:
        UserError: a field is missing, of another type, out of range, contradicted by its second name, or asks for a
            computation that this decoder does not do.
    """
    if raw.get("model_type") not in model_types:
        kinds = " and ".join(model_types)
        raise UserError(f"{where}: model_type is {_value(raw, 'model_type')}; only {kinds} are supported")
    fields = dict(raw)
    for first, second in TWO_NAMES:
        if first in raw and second in raw and raw[first] != raw[second]:
            _contradiction(where, first, raw[first], second, raw[second])
        if second in raw:
            fields[first] = raw[second]
    for name, limits in SIZES.items():
        _check_whole(fields, name, limits, where)
    for name in OPTIONAL_SIZES.keys() & fields.keys():
        if not (fields[name] is None and name in MAY_BE_NULL):
            _check_whole(fields, name, OPTIONAL_SIZES[name], where)
    for name in FLAGS:
        if name in fields and not isinstance(fields[name], bool):
            _refuse(fields, name, "true or false", where)
    _merge_rope(fields, where)
    for name, highest in NUMBERS.items():
        if name in fields and not (_is_number(fields[name]) and 0 < fields[name] <= highest):
            _refuse(fields, name, f"a number > 0 and <= {highest:g}", where)
    _check_eos(fields, where)
    _refuse_other_computations(fields, where)
    return fields


def _merge_rope(fields: dict[str, Any], where: str) -> None:
    """rope_theta, rope_scaling (transformers 4) and rope_parameters (5) say the same thing once."""
    for table_name in ("rope_parameters", "rope_scaling"):
        table = fields.get(table_name)
        if table is None:
            continue
        if not isinstance(table, dict):
            _refuse(fields, table_name, "a table or null", where)
        for name in ("rope_type", "type"):
            if table.get(name, "default") != "default":
                raise UserError(
                    f"{where}: {table_name}.{name} = {show(table[name])} is not supported; positions are rotated "
                    "without scaling here (default)"
                )
        factor = table.get("partial_rotary_factor", 1.0)
        if not (_is_number(factor) and factor == 1.0):
            raise UserError(
                f"{where}: {table_name}.partial_rotary_factor = {show(factor)} is not supported; all of a head is "
                "rotated here (1.0)"
            )
        for name in table.keys() - ROPE_FIELDS:
            if table[name] is not None:
                raise UserError(f"{where}: {table_name}.{name} = {show(table[name])} is not supported; remove it")
        if "rope_theta" not in table:
            continue
        if "rope_theta" in fields and fields["rope_theta"] != table["rope_theta"]:
            _contradiction(where, "rope_theta", fields["rope_theta"], f"{table_name}.rope_theta", table["rope_theta"])
        fields["rope_theta"] = table["rope_theta"]


def _check_eos(fields: dict[str, Any], where: str) -> None:
    value = fields.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(_is_whole(i) and 0 <= i < fields["vocab_size"] for i in ids):
        _refuse(
            fields, "eos_token_id", f"an id below vocab_size = {fields['vocab_size']}, a list of them, or null", where
        )


def _refuse_other_computations(fields: dict[str, Any], where: str) -> None:
    """Every field that would change the computation into one that this decoder does not do."""
    plain: dict[str, tuple[Any, ...]] = {
        "attention_bias": (False,),
        "use_sliding_window": (False,),
        "mlp_only_layers": ([], None),
        "decoder_sparse_step": (1,),
        "hidden_act": ("silu",),
        "attention_dropout": (0, 0.0),
        "quantization_config": (None, {}),
    }
    for name, values in plain.items():
        value = fields.get(name, values[0])
        if not any(value == plain_value and type(value) is type(plain_value) for plain_value in values):
            raise UserError(
                f"{where}: {name} = {show(value)} is not supported; the model must be a plain Qwen3-MoE checkpoint"
            )


def _check_whole(fields: dict[str, Any], name: str, limits: tuple[int, int], where: str) -> None:
    low, high = limits
    if not (_is_whole(fields.get(name)) and low <= fields[name] <= high):
        _refuse(fields, name, f"a whole number from {low} to {high}", where)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return (isinstance(value, float) and math.isfinite(value)) or _is_whole(value)


def _value(fields: dict[str, Any], name: str) -> str:
    return show(fields[name]) if name in fields else "missing"


def _refuse(fields: dict[str, Any], name: str, allowed: str, where: str) -> None:
    raise UserError(f"{where}: {name} is {_value(fields, name)}; it must be {allowed}")


def _contradiction(where: str, first: str, one: Any, second: str, other: Any) -> None:
    raise UserError(f"{where}: {first} = {show(one)} contradicts {second} = {show(other)}; keep the one that is meant")
