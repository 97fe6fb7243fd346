"""What a checkpoint holds: weights, optimizer state, counters and random generators, read and written in place.

Files of one checkpoint folder: the shards and `.metadata` of torch.distributed.checkpoint, and train_state.json. `path`
is always such a folder; which folders are complete, and which is the latest, is the business of `quads.run.checkpoint`.
"""

import json
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

from quads.distributed import current_rank
from quads.errors import UserError
from quads.finite import first_not_finite
from quads.run.checkpoint_files import CheckpointReader, SafeLoadPlanner

# Inserted into parameter names by activation checkpointing and torch.compile; a checkpoint does not depend on them.
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True)
class TrainState:
    """Where a run is. Prompts of step s are a pure function of s, so `step` is the data position too."""

    step: int = 0  # finished steps
    policy_version: int = 0  # of the weights in the checkpoint
    prompts_seen: int = 0
    tokens_seen: int = 0  # response tokens trained on


class Trainable(Protocol):
    """What a checkpoint needs of the learner."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    def counters(self) -> dict[str, int]:
        """Plain numbers that belong to the optimizer state."""
        ...

    def load_counters(self, counters: dict[str, int]) -> None:
        """Called after weights and optimizer state were loaded in place."""
        ...


def checkpoint_content(learner: Trainable) -> dict[str, Any]:
    """The live tensors to write, by name, this rank's generators among them.

    Reading an optimizer that has not stepped creates its (zero) state.
    """
    rng = {f"rank{current_rank()}": _pack_rng()}
    return {"model": _named_weights(learner.model), "optimizer": _optimizer(learner), "rng": rng}


def train_state_text(state: TrainState, learner: Trainable) -> str:
    """The text of train_state.json."""
    return json.dumps({**asdict(state), "counters": learner.counters()}, indent=2) + "\n"


def load_checkpoint(path: Path, learner: Trainable) -> TrainState:
    """Weights, optimizer state, counters and this rank's generators, in place.

    Raises:
        UserError: the checkpoint holds another model (the first wrong tensor is named), a weight that is not finite, or
            a file of it is damaged.
    """
    weights = _named_weights(learner.model)
    stored = _stored_tensors(path)
    _check_weights(path, weights, stored)
    content: dict[str, Any] = {"model": weights, "optimizer": _optimizer(learner)}
    rank = f"rank{current_rank()}"
    if f"rng.{rank}" in stored:  # with more processes than wrote it, the new ranks keep their own seeds
        content["rng"] = {rank: torch.empty(stored[f"rng.{rank}"], dtype=torch.uint8)}
    _read(path, content)
    _check_finite(path, weights)
    set_optimizer_state_dict(learner.model, learner.optimizer, content["optimizer"])
    if "rng" in content:
        _unpack_rng(content["rng"][rank])
    state, counters = _read_train_state(path)
    learner.load_counters(counters)
    return state


def load_weights(path: Path, model: nn.Module) -> TrainState:
    """Only the master weights, in place. Raises as `load_checkpoint`."""
    weights = _named_weights(model)
    _check_weights(path, weights, _stored_tensors(path))
    _read(path, {"model": weights})
    _check_finite(path, weights)
    return _read_train_state(path)[0]


@contextmanager
def single_process_is_fine() -> Iterator[None]:
    """One process without a process group is a normal case here; torch warns about it at every save."""
    with warnings.catch_warnings():
        ignore_single_process()
        yield


def ignore_single_process() -> None:
    """Silence that warning for the rest of the process: for processes that do nothing but save."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def _read(path: Path, content: dict[str, Any]) -> None:
    try:
        with single_process_is_fine():
            load(content, storage_reader=CheckpointReader(path), planner=SafeLoadPlanner())
    except CheckpointException as error:  # its own text is the traceback of every rank
        raise damaged(path, next(iter(error.failures.values()))[0]) from None
    except OSError as error:
        raise damaged(path, error) from None


def damaged(path: Path, error: BaseException) -> UserError:
    """The error to raise for a checkpoint whose files cannot be read."""
    reason = f"{type(error).__name__}: {error}".splitlines()[0].partition(". ")[0]  # torch goes on with advice
    return UserError(f"checkpoint {path} is damaged, use another one ({reason})")


def _read_train_state(path: Path) -> tuple[TrainState, dict[str, int]]:
    try:
        saved = json.loads((path / "train_state.json").read_text(encoding="utf-8"))
        counters = saved.pop("counters")
        return TrainState(**saved), counters
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, error) from None


def _optimizer(learner: Trainable) -> dict[str, Any]:
    return get_optimizer_state_dict(learner.model, learner.optimizer)  # type: ignore[return-value]


def _named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Master weights alone: packed buffers are derived from them after loading."""
    named = {}
    for name, parameter in model.named_parameters():
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        named[name] = parameter.detach()
    return named


def _stored_tensors(path: Path) -> dict[str, torch.Size]:
    """Shapes by name, from the checkpoint's own index."""
    try:
        metadata = CheckpointReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # unpickling a damaged file raises anything
        raise damaged(path, error) from None
    return {name: entry.size for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}


def _check_weights(path: Path, weights: dict[str, Tensor], stored: dict[str, torch.Size]) -> None:
    """Every weight of the model is stored with its shape, and no other weight is."""
    for name, tensor in weights.items():
        shape = stored.get(f"model.{name}")
        if shape is None:
            raise UserError(f"checkpoint {path} has no tensor {name}; another model wrote it")
        if shape != tensor.shape:
            raise UserError(
                f"checkpoint {path} holds {name} of shape {list(shape)}, the model has {list(tensor.shape)}; "
                "set [model] to the one it was written by"
            )
    for name in (stored_name.removeprefix("model.") for stored_name in stored if stored_name.startswith("model.")):
        if name not in weights:
            raise UserError(f"checkpoint {path} holds {name}, which the model lacks; another model wrote it")


def _check_finite(path: Path, weights: dict[str, Tensor]) -> None:
    name = first_not_finite(weights.items())
    if name is not None:
        raise UserError(f"checkpoint {path}: weight {name} is not finite (NaN, or beyond bf16); use an earlier one")


def _pack_rng() -> Tensor:
    """Global generators of Python, NumPy and torch on this rank, as bytes (uint8 [N])."""
    kind, keys, position, has_gauss, cached = numpy.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), position, has_gauss, cached),  # type: ignore[union-attr]
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
    buffer = BytesIO()
    torch.save(state, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _unpack_rng(packed: Tensor) -> None:
    state = torch.load(BytesIO(packed.numpy().tobytes()), weights_only=True)
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
