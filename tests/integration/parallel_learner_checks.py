"""Checks of test_parallel.py: quantized weights of a sharded learner. Each prints its name if it holds."""

import torch
from torch import Tensor

from quads.config.sections import QuantSettings
from quads.distributed import Distributed, build_meshes
from quads.model.attention import PackedContext
from quads.model.config import ModelConfig
from quads.model.logprobs import token_logprobs
from quads.model.model import MoEDecoder
from quads.model.parallelize import fsdp_modules, parallelize, write_part
from quads.quant.convert import convert_learner
from quads.quant.masters import attach, quantized_weights, requantize
from quads.quant.recipes import QuantSpec, resolve
from quads.quant.tensor import QuantizedTensor
from tests.helpers import assert_bitwise

CONFIG = ModelConfig(
    vocab_size=50, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8,
    moe_intermediate_size=16, num_experts=8, top_k=2,
)  # fmt: skip
MESHES = {2: [1, 2], 4: [2, 4]}  # number of processes -> ep sizes
TOKENS = torch.randint(0, 50, (24,), generator=torch.Generator().manual_seed(3))


def spiky_weights(generator: torch.Generator, model: MoEDecoder, write=Tensor.copy_) -> None:
    """Weights whose largest elements sit in single rows, so that a global scale of one shard alone would be wrong."""
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator) * 0.1
        if parameter.dim() > 1:
            values.view(-1)[::97] *= torch.linspace(1, 50, values.view(-1)[::97].numel())
        write(parameter, values)


def spec_of(words: str) -> QuantSpec:
    """Of a recipe, and a format behind it where it is not NVFP4: "quads mxfp4"."""
    recipe, _, format = words.partition(" ")
    return resolve(QuantSettings(recipe=recipe, format=format or "nvfp4"))


def sharded_model(world: Distributed, ep: int, recipe: str, all_gather: str, dtype: torch.dtype) -> MoEDecoder:
    spec = spec_of(recipe)
    with torch.device("meta"):
        model = MoEDecoder(CONFIG, dtype)
    convert_learner(model, spec)
    parallelize(model, build_meshes("cpu", 1, world.size, ep))
    model.to_empty(device="cpu")
    with torch.no_grad():
        spiky_weights(torch.Generator().manual_seed(0), model, write_part)
    attach(model, all_gather, spec)
    requantize(model)
    return model


def single_model(recipe: str, dtype: torch.dtype) -> MoEDecoder:
    model = MoEDecoder(CONFIG, dtype)
    with torch.no_grad():
        spiky_weights(torch.Generator().manual_seed(0), model)
    convert_learner(model, spec_of(recipe))
    requantize(model)
    return model


def forward_backward(model: MoEDecoder) -> Tensor:
    hidden_TH = model(TOKENS, PackedContext.build([10, 14]))
    loss = -token_logprobs(hidden_TH, model.output_weight(), TOKENS.roll(-1))[0].mean()
    loss.backward()
    return loss.detach()


def check_shipped_weights(world: Distributed, ep: int, recipe: str) -> None:
    """Every tensor that the sync ships has the bytes of one process, whatever the learner's own precision."""
    spec = spec_of(recipe)
    expected = dict(quantized_weights(single_model(recipe, torch.bfloat16), spec))
    names = []
    for name, tensor in quantized_weights(sharded_model(world, ep, recipe, "bf16", torch.bfloat16), spec):
        names.append(name)
        assert type(tensor) is type(expected[name]), name
        if isinstance(tensor, QuantizedTensor):
            for part, value in tensor.parts.items():
                assert_bitwise(value, expected[name].parts[part])
            for fact in ("dtype", "format", "rule"):
                assert getattr(tensor, fact) == getattr(expected[name], fact)
        else:
            assert_bitwise(tensor, expected[name])
    assert names == list(expected)


def check_all_gather(world: Distributed, ep: int, recipe: str) -> None:
    """bf16 and packed gathers: the same losses, gradients and weights through two updates, bit for bit."""
    histories = []
    for all_gather in ("bf16", "packed"):
        model = sharded_model(world, ep, recipe, all_gather, torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        history = []
        for _ in range(2):
            optimizer.zero_grad()
            history.append(forward_backward(model))
            history += [p.grad.to_local().clone() for p in model.parameters()]
            optimizer.step()
            requantize(model)
        histories.append(history + [p.to_local().clone() for p in model.parameters()])
    for one, other in zip(*histories, strict=True):
        assert_bitwise(one, other)
    assert not torch.equal(histories[0][0], histories[0][1 + len(list(model.parameters()))]), "nothing was learned"


def check_single_process(world: Distributed, ep: int, recipe: str) -> None:
    """The same loss as one process on the same tokens, in fp32 where no rounding hides a wrong scale."""
    expected = forward_backward(single_model(recipe, torch.float32))
    actual = forward_backward(sharded_model(world, ep, recipe, "bf16", torch.float32))
    assert abs(float(expected - actual)) < 1e-5 * abs(float(expected)), (recipe, expected, actual)


def check_packed_is_gathered(world: Distributed, ep: int) -> None:
    """FSDP really moves the packed bytes, 9 / 16 bytes a weight, and no experts with one owner."""
    model = sharded_model(world, ep, "quads", "packed", torch.bfloat16)
    forward_backward(model)
    counted = 0
    for module in fsdp_modules(model):
        for param in module._get_fsdp_state()._fsdp_param_group.fsdp_params:
            if param._param_fqn and ("experts" in param._param_fqn or "_proj" in param._param_fqn):
                (sent,) = param.all_gather_inputs
                assert sent.dtype == torch.uint8, param._param_fqn
                assert sent.numel() * 16 == 9 * param._sharded_local_tensor.numel(), param._param_fqn
                counted += 1
    assert counted == CONFIG.num_layers * (4 if ep == world.size else 6)


def run(world: Distributed) -> None:
    for ep in MESHES[world.size]:
        for recipe in ("quads", "quads mxfp4", "naive mxfp4", "naive", "fp8", "bf16"):
            check_shipped_weights(world, ep, recipe)
        world.print(f"ok shipped weights ep={ep}")
        for recipe in ("quads", "quads mxfp4", "symmetric", "fp8"):
            check_single_process(world, ep, recipe)
        world.print(f"ok single process ep={ep}")
        check_all_gather(world, ep, "quads")
        check_all_gather(world, ep, "quads mxfp4")
        world.print(f"ok all-gather ep={ep}")
        check_packed_is_gathered(world, ep)
        world.print(f"ok packed bytes ep={ep}")
