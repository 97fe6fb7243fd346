"""Checks of test_parallel.py: the sharded model against one process. Each prints its name if it holds."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from quads.distributed import Distributed, build_meshes
from quads.model.attention import PackedContext
from quads.model.config import ModelConfig
from quads.model.dispatch import AllToAllDispatcher
from quads.model.logprobs import token_logprobs
from quads.model.model import MoEDecoder
from quads.model.moe import LocalDispatcher
from quads.model.parallelize import gather_full, local_part, parallelize, reshard, write_part
from quads.rl.optimizer import clip_gradients
from tests.helpers import assert_bitwise, assert_close

CONFIG = ModelConfig(
    vocab_size=50,  # does not divide by 4: uneven shards
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    moe_intermediate_size=16,
    num_experts=8,
    top_k=2,
)
# (ep, replicate, checkpointing) for each number of processes
CASES = {
    2: [(1, 1, "none"), (2, 1, "moe")],
    4: [(2, 1, "full"), (4, 1, "selective"), (1, 1, "none"), (2, 2, "none")],
}
# Sums over tokens run in another order: fp32 gradients of these 8 batches agree to about 5e-7 of their largest element.
TOLERANCE = 1e-5


def make_batch(index: int) -> tuple[Tensor, list[int], Tensor]:
    """Sequences of uneven lengths: tokens [T], lengths, targets [T]."""
    generator = torch.Generator().manual_seed(index)
    lengths = [int(n) for n in torch.randint(1, 9, (3,), generator=generator)]
    tokens_T, targets_T = torch.randint(0, CONFIG.vocab_size, (2, sum(lengths)), generator=generator)
    return tokens_T, lengths, targets_T


BATCHES = [make_batch(index) for index in range(8)]
NUM_TOKENS = float(sum(len(tokens_T) for tokens_T, _, _ in BATCHES))


def loss_of(model: MoEDecoder, batch: tuple[Tensor, list[int], Tensor], replay: Tensor | None = None) -> Tensor:
    tokens_T, lengths, targets_T = batch
    context = PackedContext.build(lengths)
    context.routed_experts = None if replay is None else replay.expand(len(tokens_T), CONFIG.num_layers, -1)
    hidden_TH = model(tokens_T, context)
    return -token_logprobs(hidden_TH, model.output_weight(), targets_T)[0].sum() / NUM_TOKENS


def single_process_model() -> MoEDecoder:
    model = MoEDecoder(CONFIG)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def with_meshes(world: Distributed, ep: int, replicate: int) -> Distributed:
    """The same processes, arranged otherwise."""
    return replace(world, meshes=build_meshes("cpu", replicate, world.size // replicate, ep))


def parallel_model(world: Distributed, checkpointing: str) -> MoEDecoder:
    with torch.device("meta"):
        model = MoEDecoder(CONFIG)
    parallelize(model, world.meshes, checkpointing)
    model.to_empty(device="cpu")
    model.init_weights(torch.Generator().manual_seed(0), write_part)
    return model


def train(
    model: MoEDecoder,
    batches: list,
    replay: Tensor | None,
    lr: float,
    world: Distributed | None = None,
    steps: int = 2,
) -> list[dict[str, float]]:
    """Plain SGD with a global norm clip: Adam would turn rounding noise of small gradients into whole steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    history = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.zeros(())
        for batch in batches:
            part = loss_of(model, batch, replay)
            part.backward()
            loss += part.detach()
        if world is not None:
            world.all_reduce(loss)
        norm = clip_gradients(model.parameters(), 0.5, world)
        optimizer.step()
        history.append({"loss": float(loss), "norm": float(norm)})
    return history


def check_training(world: Distributed, ep: int, replicate: int, checkpointing: str, replay: Tensor | None) -> None:
    """Losses, clipped gradients, norms and updated weights after two updates with accumulation."""
    world = with_meshes(world, ep, replicate)
    single, parallel = single_process_model(), parallel_model(world, checkpointing)
    expected = train(single, BATCHES, replay, lr=0.5)
    actual = train(parallel, BATCHES[world.rank :: world.size], replay, lr=0.5, world=world)
    assert expected[1]["loss"] < expected[0]["loss"], "the reference does not learn"
    for one, many in zip(expected, actual, strict=True):
        for name in one:
            assert abs(one[name] - many[name]) <= TOLERANCE * abs(one[name]), (name, one, many)
    reference = dict(single.named_parameters())
    for name, parameter in parallel.named_parameters():
        assert parameter.grad is not None, name
        for mine, theirs in ((parameter, reference[name]), (parameter.grad, reference[name].grad)):
            full = gather_full(mine.to_local(), mine)
            assert theirs is not None
            assert_close(full, theirs, atol=TOLERANCE * float(theirs.detach().abs().max()))


def check_zero_learning_rate(world: Distributed) -> None:
    """The control: what moves weights is the gradient alone."""
    world = with_meshes(world, 2, 1)
    model = parallel_model(world, "none")
    before = {name: p.to_local().clone() for name, p in model.named_parameters()}
    train(model, BATCHES[world.rank :: world.size], None, lr=0.0, world=world)
    for name, parameter in model.named_parameters():
        assert_bitwise(parameter.to_local(), before[name])


def check_forward_only(world: Distributed) -> None:
    """A pass without backward leaves gathered weights behind; `reshard` makes the shards readable again."""
    model = parallel_model(with_meshes(world, 2, 1), "none")
    with torch.no_grad():
        first = loss_of(model, BATCHES[world.rank])
    reshard(model)
    for name, parameter in model.named_parameters():
        part = local_part(parameter)
        expected = dict(single_process_model().named_parameters())[name][part]
        assert_bitwise(parameter.detach().to_local(), expected.detach())
    assert float(first) == float(loss_of(model, BATCHES[world.rank]).detach())


def check_dispatch(world: Distributed, ids_TA: Tensor, num_tokens: int) -> None:
    """Rows reach their experts and come back; values, gradients and live rows as with one process."""
    ids_TA = ids_TA[:num_tokens]
    generator = torch.Generator().manual_seed(world.rank)
    x_TH = torch.randn(num_tokens, 5, generator=generator)
    gates_TA = torch.rand(num_tokens, ids_TA.shape[1], generator=generator)
    scale_E = torch.arange(1.0, CONFIG.num_experts + 1)
    results = []
    per_rank = CONFIG.num_experts // world.size
    for name, dispatcher, own_E in (
        ("one", LocalDispatcher(), scale_E),
        ("many", AllToAllDispatcher(dist.group.WORLD), scale_E[per_rank * world.rank :][:per_rank]),
    ):
        x, gates = x_TH.clone().requires_grad_(), gates_TA.clone().requires_grad_()
        rows_RH, grouping = dispatcher.dispatch(x, ids_TA, CONFIG.num_experts)
        counts_E = torch.diff(grouping.offsets_E, prepend=grouping.offsets_E.new_zeros(1))
        assert int(grouping.offsets_E[-1]) == len(rows_RH), name
        y_RH = rows_RH.square() * own_E.repeat_interleave(counts_E)[:, None]
        live_R = dispatcher.live_rows(x_TH[:, 0] > 0, grouping, ids_TA.shape[1])
        assert torch.equal(live_R, rows_RH.detach()[:, 0] > 0), name
        y_TH = dispatcher.combine(y_RH, gates, grouping)
        (y_TH * torch.arange(5.0)).sum().backward()
        results.append((y_TH.detach(), x.grad, gates.grad))
    for one, many in zip(*results, strict=True):
        assert_bitwise(many, one)


def run(world: Distributed) -> None:
    experts_TA = torch.rand(12, CONFIG.num_experts, generator=torch.Generator().manual_seed(7)).argsort(1)[:, :2]
    check_dispatch(world, experts_TA, 12 - 3 * world.rank)  # as many rows as each likes
    check_dispatch(world, torch.zeros(12, 2, dtype=torch.int64), 12)
    check_dispatch(world, experts_TA, 0 if world.rank == 0 else 6)
    world.print("ok dispatch")
    for ep, replicate, checkpointing in CASES[world.size]:
        check_training(world, ep, replicate, checkpointing, None)
        world.print(f"ok training ep={ep} replicate={replicate} checkpointing={checkpointing}")
    check_training(world, 2, 1, "none", torch.tensor([[0, 1]]))
    world.print("ok all tokens on the experts of one process")
    check_zero_learning_rate(world)
    world.print("ok zero learning rate")
    check_forward_only(world)
    world.print("ok forward only")
