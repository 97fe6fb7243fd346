"""Hugging Face folders (config.json + safetensors), read and written without transformers.

On disk each expert has its own matrices, in memory they are fused:

    model.layers.0.mlp.experts.{e}.gate_proj.weight [I, H]   \\
    model.layers.0.mlp.experts.{e}.up_proj.weight   [I, H]   -> model.layers.0.mlp.experts.gate_up_proj [E, 2I, H]
    model.layers.0.mlp.experts.{e}.down_proj.weight [H, I]   -> model.layers.0.mlp.experts.down_proj    [E, H, I]

Reading also takes the fused names; writing always splits, which is what transformers, vLLM and others read. All other
names are the same on both sides. A folder is one file (model.safetensors) or several with
model.safetensors.index.json.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from quads.errors import UserError
from quads.finite import require_finite
from quads.json_file import read_object, show
from quads.model.config import ModelConfig, load_config
from quads.model.model import MoEDecoder

READABLE = {"F32", "BF16", "F16"}
FUSED = re.compile(r"^(?P<prefix>.*\.mlp\.experts)\.(?P<kind>gate_up_proj|down_proj)$")
INDEX = "model.safetensors.index.json"


def parameter_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Name -> shape of every parameter of the model, in model order."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in MoEDecoder(config).named_parameters()}


def expert_names(name: str, expert: int) -> list[str]:
    """The names on disk of one expert's part of the fused parameter `name`, in row order; [] for other parameters."""
    match = FUSED.match(name)
    if match is None:
        return []
    parts = ["gate_proj", "up_proj"] if match["kind"] == "gate_up_proj" else ["down_proj"]
    return [f"{match['prefix']}.{expert}.{part}.weight" for part in parts]


class HFCheckpoint:
    """The tensors of a folder, checked against a config when opened and read one at a time.

    Raises UserError, naming file and tensor, for a missing, unknown or misshaped tensor, for one that would be ignored
    although it says something else than what is used in its place, and for unreadable files.
    """

    def __init__(self, folder: str | Path, config: ModelConfig) -> None:
        self.folder = Path(folder)
        self.config = config
        self.shapes = parameter_shapes(config)
        self._files = _tensor_files(self.folder)  # tensor name -> file
        self._handles: dict[Path, Any] = {}  # kept open: parsing a header again for every expert would take minutes
        self._check()

    def tensor(self, name: str, experts: range | None = None) -> Tensor:
        """The parameter `name` in its dtype on disk. `experts` reads only those experts of a fused parameter."""
        if name in self._files:
            whole = self._read(name)
            return whole if experts is None else whole[experts.start : experts.stop]
        chosen = range(self.config.num_experts) if experts is None else experts
        return torch.stack([torch.cat([self._read(part) for part in expert_names(name, e)]) for e in chosen])

    def require_finite(self, name: str, rows: range | None = None) -> None:
        """Raises UserError, with file and tensor, if the parameter `name` has NaN or infinity in what would be read of
        it. `rows`: only these experts of a fused parameter, only these rows of another."""
        if name in self._files or not expert_names(name, 0):
            whole = self._read(name)
            require_finite(name, whole if rows is None else whole[rows.start : rows.stop], self._files[name])
            return
        for expert in range(self.config.num_experts) if rows is None else rows:
            for part in expert_names(name, expert):
                require_finite(part, self._read(part), self._files[part])

    def _read(self, name: str) -> Tensor:
        path = self._files[name]
        if path not in self._handles:
            self._handles[path] = _open(path)
        return self._handles[path].get_tensor(name)

    def _check(self) -> None:
        found = dict(_headers(set(self._files.values())))
        wanted: dict[str, tuple[int, ...]] = {}
        for name, shape in self.shapes.items():
            parts = [] if name in found else [expert_names(name, e) for e in range(self.config.num_experts)]
            if not any(parts):
                wanted[name] = tuple(shape)
            for part in (part for parts_of_expert in parts for part in parts_of_expert):
                rows = shape[1] // 2 if name.endswith("gate_up_proj") else shape[1]
                wanted[part] = (rows, shape[2])
        for name, shape in wanted.items():
            if name not in found:
                hint = "; is tie_word_embeddings meant?" if name == "lm_head.weight" else ""
                raise UserError(f"{self.folder}: tensor {name} {list(shape)} of config.json is missing{hint}")
            file, dtype, actual = found[name]
            if actual != shape:
                raise UserError(f"{file}: tensor {name} has shape {list(actual)}, config.json asks for {list(shape)}")
            if dtype not in READABLE:
                raise UserError(f"{file}: tensor {name} is stored as {dtype}; use a checkpoint in bf16, fp16 or fp32")
        for name in found.keys() - wanted.keys():
            self._require_redundant(name, found[name][0])

    def _require_redundant(self, name: str, file: Path) -> None:
        """Raises UserError unless the model computes with the very values of a tensor that it has no parameter for."""
        if name == "lm_head.weight" and self.config.tie_embeddings:  # a copy of the embedding
            head, embedding = self._read(name), self._read("model.embed_tokens.weight")
            same_type = head.dtype == embedding.dtype  # a cast to the wider one of two types loses nothing
            if not torch.equal(*((head, embedding) if same_type else (head.double(), embedding.double()))):
                raise UserError(
                    f"{file}: tensor {name} is not the embedding, but tie_word_embeddings of config.json says it is; "
                    "set that to false to use the stored one, or remove the tensor"
                )
        elif name.endswith("rotary_emb.inv_freq"):  # older files store this derived table
            config = self.config
            exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
            derived, stored = config.rope_theta**-exponents, self._read(name)
            rounding = 0.01 if stored.dtype.itemsize == 2 else 1e-5
            if stored.shape != derived.shape or not torch.allclose(stored.double(), derived, rtol=rounding, atol=0.0):
                raise UserError(
                    f"{file}: tensor {name} is not that of rope_theta = {config.rope_theta:g} in config.json; correct "
                    "rope_theta, or remove the tensor"
                )
        else:
            raise UserError(f"{file}: unknown tensor {name}; only plain Qwen3-MoE checkpoints load")


@torch.no_grad()
def load_hf(folder: str | Path, model: MoEDecoder) -> None:
    """Copies the weights of a folder into a model of that shape, in place. Nothing is written if anything is wrong: the
    values are read once to see that they are finite, and once more, then out of memory, to copy them."""
    check_same_shape(folder, model)
    checkpoint = HFCheckpoint(folder, model.config)
    for name in checkpoint.shapes:
        checkpoint.require_finite(name)
    for name, parameter in model.named_parameters():
        parameter.copy_(checkpoint.tensor(name))


def load_model(
    folder: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> MoEDecoder:
    """Builds the model that a folder describes, with fp32 master weights; `dtype` is that of the activations."""
    config = load_config(folder)
    with torch.device(device):
        model = MoEDecoder(config, dtype)
    load_hf(folder, model)
    return model


def save_hf(
    folder: str | Path,
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]] | nn.Module,
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int = 5 * 2**30,
) -> None:
    """Writes config.json and safetensors of at most `shard_bytes` each (a single tensor may exceed it).

    `tensors` are (parameter name, value) in any order, each parameter once, or a model. With `qk_norm` the folder
    loads in transformers (Qwen3MoeForCausalLM) and vLLM; without, no published class has this layout and the folder
    is marked with the model type quads_moe, which only this project reads. config.json is written last and replaces
    an older one, so a folder that was being written when the process died is not mistaken for a complete one.
    """
    if isinstance(tensors, nn.Module):
        tensors = [(name, parameter.detach()) for name, parameter in tensors.named_parameters()]
    values = ((name, tensor.to(dtype)) for name, tensor in split_experts(config, tensors))
    torch_dtype = str(dtype).removeprefix("torch.")
    write_folder(folder, values, {**config.to_hf(), "torch_dtype": torch_dtype}, shard_bytes)


def write_folder(
    folder: str | Path, tensors: Iterable[tuple[str, Tensor]], config: dict[str, Any], shard_bytes: int = 5 * 2**30
) -> None:
    """Writes tensors as they come, under the names they have, and `config` as config.json, in the order of
    `save_hf`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    shards: list[list[str]] = []
    total_bytes = 0
    for shard in _shards(tensors, shard_bytes):
        save_file(shard, folder / f"part-{len(shards):05d}.tmp", metadata={"format": "pt"})
        shards.append(list(shard))
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
    for old in [*folder.glob("*.safetensors"), folder / INDEX]:
        old.unlink(missing_ok=True)
    weight_map = {}
    for number, names in enumerate(shards):
        single = len(shards) == 1
        file_name = "model.safetensors" if single else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(folder / f"part-{number:05d}.tmp", folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    if len(shards) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})
    _write_json(folder / "config.json", config)


def split_experts(config: ModelConfig, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Fused parameters to one matrix an expert; checks that every parameter comes once, in its shape."""
    missing = parameter_shapes(config)
    for name, tensor in tensors:
        shape = missing.pop(name, None)
        if shape != tensor.shape:
            expected = "unknown, or was given twice" if shape is None else f"expected as {tuple(shape)}"
            raise ValueError(f"save_hf: {name} of shape {tuple(tensor.shape)} is {expected}")
        if not expert_names(name, 0):
            yield name, tensor
            continue
        for expert, matrix in enumerate(tensor.unbind(0)):
            parts = expert_names(name, expert)
            yield from zip(parts, matrix.chunk(len(parts)), strict=True)
    if missing:
        raise ValueError(f"save_hf: no value was given for {sorted(missing)}")


def _shards(tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        # safetensors refuses tensors that share memory, which the parts of a fused parameter do.
        stored = tensor.detach().to("cpu", copy=True).contiguous()
        if shard and size + stored.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = stored
        size += stored.nbytes
    yield shard


def check_same_shape(folder: str | Path, model: MoEDecoder) -> None:
    """A folder of other sizes is the user's mix-up; the message names the first field that differs."""
    wanted, found = model.config, load_config(folder)
    computed = ("norm_topk_prob", "qk_norm", "rope_theta", "rms_norm_eps", "tie_embeddings")
    sizes = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "top_k")
    for name in (*sizes, *computed):
        if getattr(wanted, name) != getattr(found, name):
            raise UserError(
                f"{folder}/config.json: {name} is {getattr(found, name)}, but the model to fill has "
                f"{getattr(wanted, name)}; build the model from that config.json"
            )


def _tensor_files(folder: Path) -> dict[str, Path]:
    index = folder / INDEX
    if index.is_file():
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise UserError(
                f"{index}: weight_map is {show(weight_map)}; it must map names of tensors to files, save or download "
                "the model again"
            )
        files = {name: folder / file for name, file in weight_map.items()}
    else:
        singles = sorted(folder.glob("*.safetensors"))
        if len(singles) != 1:
            raise UserError(
                f"{folder} has {len(singles)} safetensors files and no {INDEX}; save or download the model again"
            )
        files = {name: file for name, (file, _, _) in _headers(set(singles))}
    for file in sorted(set(files.values())):
        if not file.is_file():
            raise UserError(f"{file} does not exist, but {index.name} lists it; save or download the model again")
    return files


def _headers(files: set[Path]) -> Iterator[tuple[str, tuple[Path, str, tuple[int, ...]]]]:
    """(tensor name, (file, dtype, shape)) of all tensors of the files."""
    for path in sorted(files):
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                entry = file.get_slice(name)
                yield name, (path, entry.get_dtype(), tuple(entry.get_shape()))


def _open(path: Path):
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read as safetensors ({error}); save or download the model again") from None


def _write_json(path: Path, content: dict) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)
