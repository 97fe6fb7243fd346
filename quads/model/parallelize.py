"""From the single-device model to one that many processes train: the order is fixed.

    expert parallelism -> activation checkpointing -> torch.compile -> FSDP2

The parameters become DTensors that own this process's shard; module code is unchanged. Every process computes the loss
of its own tokens divided by the GLOBAL denominator, so gradients are sums over processes and nothing is averaged:
every sharded FSDP module gets a gradient divide factor of 1. Two reasons. The backward of the token exchange already
sums an expert's gradient over its ep group, so the default average over the (smaller) expert mesh would leave expert
gradients `ep` times too large against the dense ones, which a global norm clip feels. And 1 is the only factor that
FSDP applies exactly once in every case (with a mesh of one process it divides twice by any other).

The master weights are fp32. FSDP gathers them in the dtype of the activations, the cast that the modules would do
themselves, and reduces gradients in fp32.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from quads.distributed import Meshes
from quads.errors import UserError
from quads.model.dispatch import AllToAllDispatcher
from quads.model.hf import HFCheckpoint, check_same_shape, expert_names
from quads.model.model import Attention, DecoderLayer, MoEDecoder

Checkpointing = Literal["none", "full", "selective", "moe"]

# What "selective" keeps: the matmuls, attention and the token exchange. Everything between them is computed again.
KEPT_OPS = (
    "aten.mm",
    "aten._grouped_mm",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "torch_attn._varlen_attn",
    "quads.exchange_rows",
)


def parallelize(
    model: MoEDecoder, meshes: Meshes | None, checkpointing: Checkpointing = "none", compile: bool = False
) -> MoEDecoder:
    """Prepare a model for training on `meshes`, in place, and return it.

    Args:
        model: not yet holding values if there is more than one process: build it on the meta device, give it memory
            with `to_empty(device=...)` afterwards, fill it through `write_part` or `load_hf_sharded`.
        meshes: None with one process; the model then is only checkpointed and compiled.

    Raises:
        UserError: the experts do not divide by the ep size.
    """
    if meshes is not None and meshes.ep.size() > 1:
        apply_expert_parallel(model, meshes.ep)
    for layer in decoder_layers(model):
        apply_checkpointing(layer, checkpointing)
    if compile:
        apply_compile(model)
    if meshes is not None:
        apply_fsdp(model, meshes)
    return model


def decoder_layers(model: MoEDecoder) -> Iterator[DecoderLayer]:
    for layer in model.model.layers:
        assert isinstance(layer, DecoderLayer)
        yield layer


def apply_expert_parallel(model: MoEDecoder, mesh: DeviceMesh) -> None:
    """Give each process of `mesh` an equal, contiguous share of every layer's experts."""
    num_experts = model.config.num_experts
    if num_experts % mesh.size():
        raise UserError(f"[parallel] ep = {mesh.size()} must divide the model's {num_experts} experts")
    dispatcher = AllToAllDispatcher(mesh.get_group())
    for layer in decoder_layers(model):
        experts = layer.mlp.experts
        experts.dispatcher = dispatcher
        for name, parameter in list(experts.named_parameters(recurse=False)):
            sharded = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(sharded))


def apply_checkpointing(layer: DecoderLayer, mode: Checkpointing) -> None:
    """What the backward pass computes again: nothing, the layer, all but its large products, or its experts (paper)."""
    if mode == "full":
        _checkpoint_forward(layer)
    elif mode == "selective":
        _checkpoint_forward(layer, partial(create_selective_checkpoint_contexts, _keep_large_products))
    elif mode == "moe":
        _checkpoint_forward(layer.mlp)


def apply_compile(model: MoEDecoder) -> None:
    """Compile the parts of each layer between attention, whose context differs from batch to batch, and the token
    exchanges, whose sizes the host has to read. All layers share the compiled code."""
    attend = torch.compiler.disable(Attention.attend)  # one object for all layers: each of its own would recompile
    for dispatcher in {layer.mlp.experts.dispatcher for layer in decoder_layers(model)}:
        dispatcher.sort, dispatcher.weigh = torch.compile(dispatcher.sort), torch.compile(dispatcher.weigh)
    for layer in decoder_layers(model):
        layer.self_attn.attend = attend  # type: ignore[method-assign]
        _compile_layer(layer)


def _compile_layer(layer: DecoderLayer) -> None:
    for module in (layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlp.gate):
        module.forward = torch.compile(module.forward)  # type: ignore[method-assign]
    layer.mlp.experts.compute = torch.compile(layer.mlp.experts.compute)


def apply_fsdp(model: MoEDecoder, meshes: Meshes) -> None:
    """Shard experts over the expert mesh, each layer's rest over the dense mesh, embeddings and head with the root.

    Where ep takes all processes, an expert has one owner and there is nothing to gather or to reduce. FSDP would copy
    its weights and gradients all the same, so it is told to leave them alone: the layer casts its master (or decodes
    its packed weight) like a single process, and the gradient that arrives through that cast is complete.
    """
    param_dtype = None if model.dtype == torch.float32 else model.dtype
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    experts = [layer.mlp.experts for layer in decoder_layers(model)]
    owned = {p for module in experts for p in module.parameters()} if meshes.expert.size() == 1 else set()
    for layer in decoder_layers(model):
        if not owned:
            fully_shard(layer.mlp.experts, mesh=meshes.expert, mp_policy=policy)
        fully_shard(layer, mesh=meshes.dense, mp_policy=policy, ignored_params=owned)
    fully_shard(model, mesh=meshes.dense, mp_policy=policy, ignored_params=owned)
    for module in fsdp_modules(model):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum, and none is wanted
        module.set_gradient_divide_factor(1.0)
    prefetch_next_layers(model)


def prefetch_next_layers(model: MoEDecoder) -> None:
    """Each layer asks for the weights of the next one before it computes, in both directions.

    Left to itself FSDP asks when the next layer starts, which is early enough only while the host runs ahead of the
    GPU. With expert parallelism it does not: it waits for the sizes of each token exchange.
    """
    layers = [fsdp_modules(layer) for layer in decoder_layers(model)]  # the layer, and its experts if they are sharded
    for layer, following in zip(layers, layers[1:], strict=False):
        layer[0].set_modules_to_forward_prefetch(following)
        following[0].set_modules_to_backward_prefetch(layer)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """The FSDP modules of a model, none with one process."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free gathered weights. After a forward without backward the root still holds its own, and `named_parameters`
    then yields those instead of the shards; call this before reading, saving or quantizing parameters."""
    for module in fsdp_modules(model):
        module.reshard()


def local_part(parameter: Tensor) -> tuple[slice, ...]:
    """Where this process's part of a parameter lies in the full tensor."""
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, size) for size in parameter.shape)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def local_tensor(parameter: Tensor) -> Tensor:
    """This process's part of a parameter, the very tensor that FSDP and the optimizer hold (not a view of it)."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def is_sharded(parameter: Tensor) -> bool:
    """Whether this process holds a part of the parameter, or all of it among other processes."""
    return isinstance(parameter, DTensor)


def is_gathered(parameter: Tensor) -> bool:
    """Whether FSDP makes the weight that a layer multiplies. False with one process, and for experts with one owner."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names != ("ep",)


def gathered_rows(parameter: Tensor) -> int:
    """Rows (or experts) of the weight that is multiplied here: all of them, or those of this process's ep rank."""
    return parameter.shape[0] // _ep_size(parameter)


def own_rows(parameter: Tensor) -> slice:
    """Where this process's rows lie in the weight that is multiplied here."""
    rows = local_part(parameter)[0]
    start = rows.start % gathered_rows(parameter) if rows.stop > rows.start else 0
    return slice(start, start + rows.stop - rows.start)


def max_over_shards(values: Tensor, parameter: Tensor) -> Tensor:
    """All-reduce(MAX) of `values`, in place, over the FSDP shards of `parameter`; never over ep."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for dim, placement in enumerate(parameter.placements):
            if not isinstance(placement, Replicate) and _name(mesh, dim) != "ep":
                dist.all_reduce(values, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    return values


@torch.no_grad()
def write_part(parameter: Tensor, values: Tensor) -> None:
    """Store this process's part of the full `values`."""
    local_tensor(parameter).copy_(values[local_part(parameter)])


@torch.no_grad()
def load_hf_sharded(folder: str | Path, model: MoEDecoder) -> None:
    """`load_hf` for a sharded model: each process reads the experts it owns, one tensor at a time, and finds the values
    that are not finite among them."""
    check_same_shape(folder, model)
    checkpoint = HFCheckpoint(folder, model.config)
    parts = {name: local_part(parameter)[0] for name, parameter in model.named_parameters()}
    owned = {name: range(rows.start, rows.stop) for name, rows in parts.items() if rows.stop > rows.start}
    for name, rows in owned.items():  # none where there are more processes than rows
        checkpoint.require_finite(name, rows)
    for name, parameter in model.named_parameters():
        if name in owned:
            fused = bool(expert_names(name, 0))
            values = checkpoint.tensor(name, owned[name]) if fused else checkpoint.tensor(name)[parts[name]]
            local_tensor(parameter).copy_(values)


@torch.no_grad()
def gather_full(local: Tensor, parameter: Tensor) -> Tensor:
    """The full tensor of which `local` is this process's part; collective over the processes that share `parameter`.

    `local` has the rows of the local part of `parameter`, in any dtype and width (packed codes, a cast): what travels
    is exactly its bytes. Without sharding it is returned as it is.
    """
    if not isinstance(parameter, DTensor):
        return local
    mesh = parameter.device_mesh
    sharded = [dim for dim, placement in enumerate(parameter.placements) if not isinstance(placement, Replicate)]
    rows = parameter.shape[0]
    rows_after = []  # of the result of the gather over each mesh dimension; the last one is the outermost split
    for dim in reversed(sharded):
        rows_after.append(rows)
        rows = -(-rows // mesh.size(dim))
    bits = local.contiguous().view(torch.uint8) if local.dtype.itemsize == 1 else local.contiguous()
    for dim, total in zip(sharded, reversed(rows_after), strict=True):
        chunk = -(
            -total // mesh.size(dim)
        )  # torch.chunk: equal parts but for the last ones, which may be short or empty
        padded = bits.new_zeros(chunk, *bits.shape[1:])
        padded[: bits.shape[0]] = bits
        gathered = bits.new_empty(mesh.size(dim) * chunk, *bits.shape[1:])
        dist.all_gather(list(gathered.chunk(mesh.size(dim))), padded, group=mesh.get_group(dim))
        bits = gathered[:total]
    return bits.view(local.dtype)


def _name(mesh: DeviceMesh, dim: int) -> str:
    return (mesh.mesh_dim_names or ())[dim]


def _ep_size(parameter: Tensor) -> int:
    mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
    names = () if mesh is None else mesh.mesh_dim_names or ()
    return mesh.size(names.index("ep")) if mesh is not None and "ep" in names else 1


def _checkpoint_forward(module: nn.Module, context_fn: Callable[[], Any] | None = None) -> None:
    options = {} if context_fn is None else {"context_fn": context_fn}
    # Nothing in the model draws random numbers, so there is no generator state to keep.
    module.forward = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False, **options)


def _keep_large_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = str(op).rpartition(".")[0] in KEPT_OPS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
