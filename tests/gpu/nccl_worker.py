"""Runs in every process of test_nccl.py: torchrun --nproc_per_node=2 nccl_worker.py DEVICE FOLDER [CHECK ...]

Each check prints its name, what it measured and how long it took, if it holds. DEVICE cpu runs the same over gloo.
"""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from quads.config.sections import CheckpointSettings, OptimSettings, ParallelSettings, QuantSettings, RLSettings
from quads.config.sections import TrainSettings as Train
from quads.distributed import Distributed, build_meshes, init_distributed
from quads.model.config import ModelConfig
from quads.model.model import MoEDecoder
from quads.model.parallelize import gather_full, local_tensor, parallelize, reshard, write_part
from quads.quant.convert import convert_learner
from quads.quant.masters import attach, quantized_weights, requantize
from quads.quant.recipes import resolve
from quads.quant.tensor import QuantizedTensor
from quads.rl.learner import Learner
from quads.rl.optimizer import build_adamw
from quads.rl.packing import Microbatch, Sample, pack
from quads.run.checkpoint import Checkpointer
from quads.run.checkpoint_state import TrainState
from quads.types import Completion
from tests.helpers import assert_bitwise

CONFIG = ModelConfig(
    vocab_size=1000, hidden_size=256, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=64,
    moe_intermediate_size=128, num_experts=16, top_k=4, rope_theta=1e4,
)  # fmt: skip
UPDATES = 2
# One block of flash attention's backward a sequence: longer ones add up dQ atomically, in an order that varies.
LENGTHS = [60, 13, 64, 1 + 1, 33, 50, 64, 7]
# bf16 rounds in another order when a batch is split: relative to the loss, to the norm, and to a weight's whole change.
# One process on a CPU that splits this batch into four micro-batches in place of two is 1.6e-3, 4e-4 and 0.09 (of a
# router) from itself. What would be wrong by a factor or a missing term shows in fp32.
TOLERANCE = {
    torch.float32: {"loss": 1e-5, "norm": 1e-4, "change": 1e-3},
    torch.bfloat16: {"loss": 4e-3, "norm": 2e-2, "change": 0.2},
}

MOMENTS_TOLERANCE = {"cpu": 0.02, "8bit": 0.1}  # of the change of all weights


def samples(indices: range) -> list[Sample]:
    made = []
    for i in indices:
        generator = torch.Generator().manual_seed(i)
        first, *rest = torch.randint(CONFIG.vocab_size, (LENGTHS[i],), generator=generator).tolist()
        made.append(Sample([first], Completion(rest, [-7.0] * len(rest), "stop", 0), 1.0 if i % 2 else -0.5))
    return made


def init(model: MoEDecoder, device: torch.device, write=Tensor.copy_) -> None:
    """Larger than usual weights: with std 0.02 the layers hardly change the residual stream of so small a model."""

    def scaled(parameter: Tensor, values: Tensor) -> None:
        write(parameter, values * 2.0)

    model.init_weights(torch.Generator(device).manual_seed(0), scaled)


def make_learner(
    world: Distributed,
    recipe: str,
    dtype: torch.dtype,
    ep: int,
    all_gather: str,
    sgd: bool = True,
    compile: bool = False,
) -> Learner:
    """ep = 0: one process for itself."""
    spec = resolve(QuantSettings(recipe=recipe))  # type: ignore[arg-type]
    meshes = build_meshes(world.device.type, 1, world.size, ep) if ep else None
    world = replace(world, size=world.size if ep else 1, meshes=meshes)
    with torch.device("meta"):
        model = MoEDecoder(CONFIG, dtype)
    convert_learner(model, spec)
    parallelize(model, meshes, "none", compile)
    model.to_empty(device=world.device)
    init(model, world.device, write_part)
    if ep:
        attach(model, all_gather, spec)  # type: ignore[arg-type]
    settings = OptimSettings(lr=0.05 if sgd else 1e-3)
    learner = Learner(
        model, spec, settings, RLSettings(), temperature=1.0, steps=100, updates_per_step=1, world=world if ep else None
    )
    if sgd:  # Adam would turn rounding noise of small gradients into whole steps
        learner.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return learner


def batch(learner: Learner, indices: range) -> tuple[list[Microbatch], float]:
    """Two micro-batches of these samples (as many on every process), and the denominator of all."""
    microbatches, _ = pack(samples(indices), 1000, "token", at_least=2)
    return learner.add_fixed_logprobs(microbatches), float(sum(LENGTHS) - len(LENGTHS))


def train(learner: Learner, indices: range, updates: int = UPDATES) -> list[tuple[float, float]]:
    microbatches, denominator = batch(learner, indices)
    stats = [learner.update(microbatches, denominator) for _ in range(updates)]
    return [(s.loss, s.grad_norm) for s in stats]


def own(world: Distributed) -> range:
    return range(world.rank, len(LENGTHS), world.size)


def full_weights(model: MoEDecoder) -> dict[str, Tensor]:
    reshard(model)
    return {name: gather_full(local_tensor(p).detach(), p).clone() for name, p in model.named_parameters()}


def check_equals_one_process(world: Distributed, recipe: str, dtype: torch.dtype, ep: int) -> str:
    """Losses, norms and weights of some updates against one process on the same batch."""
    start = make_learner(world, recipe, dtype, 0, "bf16")
    before = full_weights(start.model)
    expected, limit = train(start, range(len(LENGTHS))), TOLERANCE[dtype]
    learner = make_learner(world, recipe, dtype, ep, "packed" if recipe == "quads" else "bf16")
    actual = train(learner, own(world))
    loss_error = max(abs(a[0] - e[0]) / abs(e[0]) for a, e in zip(actual, expected, strict=True))
    norm_error = max(abs(a[1] - e[1]) / e[1] for a, e in zip(actual, expected, strict=True))
    change_error, after = 0.0, full_weights(start.model)
    for name, weight in full_weights(learner.model).items():
        change = (after[name] - before[name]).norm()
        assert change > 0, f"{name} did not move"
        change_error = max(change_error, float((weight - after[name]).norm() / change))
    measured = {"loss": loss_error, "norm": norm_error, "change": change_error}
    assert all(measured[name] <= limit[name] for name in limit), (measured, limit, expected, actual)
    return f"first loss {actual[0][0]:.5f} norm {actual[0][1]:.4f}; largest errors " + ", ".join(
        f"{name} {value:.1e}" for name, value in measured.items()
    )


def check_gathers(world: Distributed, ep: int) -> str:
    """Packed and bf16 gathers: losses, norms, gradients and weights of some updates, bit for bit."""
    results = []
    for all_gather in ("bf16", "packed"):
        learner = make_learner(world, "quads", torch.bfloat16, ep, all_gather)
        history = train(learner, own(world))
        reshard(learner.model)
        parameters = list(learner.model.parameters())
        results.append((history, [local_tensor(x) for p in parameters for x in (p, p.grad) if x is not None]))
    assert results[0][0] == results[1][0], results
    for one, other in zip(results[0][1], results[1][1], strict=True):
        assert_bitwise(one, other)
    return f"{len(results[0][1])} tensors of rank {world.rank} equal"


def check_shipped(world: Distributed, ep: int) -> str:
    """What the sync ships after some updates is what one process would quantize from the same master weights."""
    learner = make_learner(world, "quads", torch.bfloat16, ep, "packed")
    train(learner, own(world))
    alone = make_learner(world, "quads", torch.bfloat16, 0, "bf16")
    weights = full_weights(learner.model)
    with torch.no_grad():
        for name, parameter in alone.model.named_parameters():
            parameter.copy_(weights[name])
    requantize(alone.model)
    expected = dict(quantized_weights(alone.model, alone.spec))
    count = 0
    for name, tensor in quantized_weights(learner.model, learner.spec):
        parts = tensor.parts if isinstance(tensor, QuantizedTensor) else {"": tensor}
        for part, value in parts.items():
            wanted = expected[name].parts[part] if part else expected[name]
            assert_bitwise(value, wanted)
            count += 1
    return f"{count} tensors equal"


def check_checkpoint(world: Distributed, folder: Path) -> str:
    """Saved in the background at ep 2 while training goes on, resumed at ep 1: weights to the bit, the next update."""
    settings = CheckpointSettings(resume="latest", keep=0, async_save=True)
    learner = make_learner(world, "quads", torch.bfloat16, 2, "packed", sgd=False)
    train(learner, own(world), 2)
    saved = full_weights(learner.model)
    checkpointer = Checkpointer(folder, settings)
    checkpointer.save(TrainState(step=2), learner)
    expected = train(learner, own(world), 1)[0]
    checkpointer.wait()
    resumed = make_learner(world, "quads", torch.bfloat16, 1, "packed", sgd=False)
    state = Checkpointer(folder, settings).resume(resumed)
    assert state.step == 2 and resumed.updates == 2
    for name, weight in full_weights(resumed.model).items():
        assert_bitwise(weight, saved[name])
    actual = train(resumed, own(world), 1)[0]
    assert (
        abs(actual[0] - expected[0]) <= 2e-3 * abs(expected[0]) and abs(actual[1] - expected[1]) <= 2e-2 * expected[1]
    )
    return f"next loss {actual[0]:.5f} and {expected[0]:.5f}, norm {actual[1]:.4f} and {expected[1]:.4f}"


def check_moments(world: Distributed, folder: Path, moments: Literal["cpu", "8bit"]) -> str:
    """Sharded moments in 8 bits or in CPU memory: near fp32 ones on the device through some updates, and saved and
    resumed with the same next loss."""
    settings = CheckpointSettings(resume="latest", keep=0, async_save=False)

    def make(moments: Literal["float32", "cpu", "8bit"]) -> Learner:
        learner = make_learner(world, "quads", torch.bfloat16, 2, "packed", sgd=False)
        learner.optimizer = build_adamw(learner.model, 1e-3, (0.9, 0.95), 1e-8, 0.0, moments)
        return learner

    reference, learner = make("float32"), make(moments)
    before = full_weights(reference.model)
    expected, actual = train(reference, own(world), 3), train(learner, own(world), 3)
    after = full_weights(reference.model)
    weights = full_weights(learner.model).items()
    error = math.sqrt(sum(float((weight - after[name]).square().sum()) for name, weight in weights))
    change = math.sqrt(sum(float((after[name] - old).square().sum()) for name, old in before.items()))
    measured = f"change of weights {error / change:.1e}; (loss, norm) {actual}, with fp32 moments {expected}"
    # Of Adam's first steps every element makes a whole one, also where its gradient is the noise of bf16.
    assert error <= MOMENTS_TOLERANCE[moments] * change, measured
    stored = [local_tensor(state["exp_avg"]) for state in learner.optimizer.state.values()]
    kept = [type(x).__name__ == "OptimState8bit" if moments == "8bit" else x.device.type == "cpu" for x in stored]
    assert any(kept) if moments == "8bit" else all(kept), [type(x).__name__ for x in stored]
    Checkpointer(folder, settings).save(TrainState(step=3), learner)
    resumed = make(moments)
    Checkpointer(folder, settings).resume(resumed)
    following, after_resume = train(learner, own(world), 1)[0], train(resumed, own(world), 1)[0]
    assert following == after_resume, (following, after_resume)
    return f"{sum(kept)} of {len(kept)} moments; {measured}"


def check_compile(world: Distributed, ep: int) -> str:
    """Compiled and eager layers: the same losses but for rounding of bf16 intermediates, which fused code skips."""
    histories = [
        train(make_learner(world, "quads", torch.bfloat16, ep, "packed", compile=compile), own(world))
        for compile in (False, True)
    ]
    for eager, compiled in zip(*histories, strict=True):
        assert abs(eager[0] - compiled[0]) <= 5e-3 * abs(eager[0]), histories
        assert abs(eager[1] - compiled[1]) <= 5e-2 * eager[1], histories
    return f"(loss, norm) eager {histories[0]}, compiled {histories[1]}"


def main(device: str, folder: str, only: list[str]) -> None:
    with init_distributed(ParallelSettings(), Train(device=device)) as world:  # type: ignore[arg-type]
        checks: dict[str, Callable[[], str]] = {}
        for ep in (1, 2):
            for recipe, dtype in (("bf16", torch.float32), ("bf16", torch.bfloat16), ("quads", torch.bfloat16)):
                name = f"equal:{recipe}:{str(dtype).removeprefix('torch.')}:ep{ep}"
                checks[name] = lambda recipe=recipe, dtype=dtype, ep=ep: check_equals_one_process(
                    world, recipe, dtype, ep
                )
            checks[f"gathers:ep{ep}"] = lambda ep=ep: check_gathers(world, ep)
            checks[f"shipped:ep{ep}"] = lambda ep=ep: check_shipped(world, ep)
        checks["checkpoint"] = lambda: check_checkpoint(world, Path(folder))
        for moments in ("8bit", "cpu"):
            checks[f"moments:{moments}"] = lambda moments=moments: check_moments(
                world, Path(folder) / f"moments_{moments}", moments
            )
        checks["compile:ep2"] = lambda: check_compile(world, 2)
        for name, check in checks.items():
            if not only or any(name.startswith(prefix) for prefix in only):
                began = time.perf_counter()
                measured = check()
                world.print(f"ok {name} ({time.perf_counter() - began:.1f} s): {measured}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
