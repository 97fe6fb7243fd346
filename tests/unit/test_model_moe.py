"""The mixture of experts against one expert and one token at a time."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quads.model.moe import Experts, MoE, Router, expert_matmul, matmul_mode
from tests.helpers import assert_bitwise, assert_close

COUNTS = {
    "uneven": [3, 0, 11, 1, 5],
    "all on one": [0, 0, 20, 0, 0],
    "first and last empty": [0, 4, 4, 4, 0],
    "no rows": [0, 0, 0, 0, 0],
}


def offsets(counts: list[int]) -> Tensor:
    return torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_and_loop_agree(counts: list[int], dtype: torch.dtype) -> None:
    x = torch.randn(sum(counts), 16, dtype=dtype)
    w = torch.randn(5, 8, 16, dtype=dtype)
    upstream = torch.randn(sum(counts), 8, dtype=dtype)
    results = []
    for mode in ("grouped", "loop"):
        x_leaf, w_leaf = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = expert_matmul(x_leaf, w_leaf, offsets(counts), mode)
        (y * upstream).sum().backward()
        results.append((y, x_leaf.grad, w_leaf.grad))
    for grouped, loop in zip(*results, strict=True):
        # K = 16 products: a few ulp of values up to about 10 (bf16 ulp there is 2**-4, fp32 2**-20)
        assert_close(grouped, loop, atol=0.13 if dtype == torch.bfloat16 else 1e-5)


def test_mode_says_what_the_kernel_takes() -> None:
    w = torch.empty(2, 8, 16)
    assert matmul_mode(torch.empty(1, 16), w) == "grouped"
    assert matmul_mode(torch.empty(1, 16, dtype=torch.float64), w.double()) == "loop"
    assert matmul_mode(torch.empty(1, 16, dtype=torch.bfloat16), torch.empty(2, 4, 16)) == "loop"  # 4 * 2 bytes
    assert matmul_mode(torch.empty(1, 13), torch.empty(2, 8, 13)) == "loop"


def one_by_one(moe: MoE, x_TH: Tensor, ids_TA: Tensor, gates_TA: Tensor) -> Tensor:
    rows = []
    for x, ids, gates in zip(x_TH, ids_TA, gates_TA, strict=True):
        total = torch.zeros_like(x)
        for expert, gate in zip(ids.tolist(), gates, strict=True):
            g, u = (moe.experts.gate_up_proj[expert].to(x.dtype) @ x).chunk(2)
            total = total + gate * (moe.experts.down_proj[expert].to(x.dtype) @ (F.silu(g) * u))
        rows.append(total)
    return torch.stack(rows)


def make_moe(hidden: int = 16, width: int = 12, experts: int = 5, top_k: int = 2) -> MoE:
    moe = MoE(hidden, width, experts, top_k, norm_topk_prob=True)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return moe


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [1, 9])
def test_forward_equals_one_token_at_a_time(dtype: torch.dtype, tokens: int) -> None:
    moe = make_moe()
    x = torch.randn(tokens, 16, dtype=dtype)
    y, ids = moe(x)
    assert y.dtype == dtype
    _, gates = moe.gate(x)
    assert_close(y, one_by_one(moe, x, ids, gates), atol=1e-12 if dtype == torch.float64 else 1e-5)


def test_expert_gradients_equal_one_token_at_a_time() -> None:
    moe = make_moe().double()
    x = torch.randn(9, 16, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(9, 16, dtype=torch.float64)
    y, ids = moe(x)
    inputs = [x, *moe.parameters()]
    ours = torch.autograd.grad((y * upstream).sum(), inputs)
    ids2, gates = moe.gate(x)
    assert_bitwise(ids, ids2)
    theirs = torch.autograd.grad((one_by_one(moe, x, ids, gates) * upstream).sum(), inputs)
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, atol=1e-12)


def test_router_gates_by_hand() -> None:
    router = Router(2, 3, 2, norm_topk_prob=False)
    router.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    ids, gates = router(torch.tensor([[2.0, 1.0]]))
    p = torch.tensor([2.0, 1.0, 0.0]).softmax(0)
    assert ids.tolist() == [[0, 1]]
    assert_close(gates, p[None, :2], atol=1e-7)
    router.norm_topk_prob = True
    assert_close(router(torch.tensor([[2.0, 1.0]]))[1], p[None, :2] / p[:2].sum(), atol=1e-7)


def test_router_computes_in_fp32_from_rounded_weights() -> None:
    router = Router(64, 4, 1, norm_topk_prob=False)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(5, 64).bfloat16()
    expected = (x.double() @ router.weight.bfloat16().double().t()).softmax(-1).max(-1, keepdim=True).values
    assert_close(router(x)[1], expected.bfloat16(), atol=2**-9)  # one bf16 ulp below 1


def test_replay_uses_given_experts_with_live_gates() -> None:
    router = Router(8, 6, 2, norm_topk_prob=True)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(4, 8)
    own_ids, _ = router(x)
    replay = torch.tensor([[5, 0], [1, 2], [-1, -1], [3, 4]], dtype=torch.int16)
    ids, gates = router(x, replay)
    assert ids[[0, 1, 3]].tolist() == [[5, 0], [1, 2], [3, 4]]
    assert ids[2].tolist() == own_ids[2].tolist()  # not recorded: chooses for itself
    probs = (x @ router.weight.t()).softmax(-1).gather(1, ids)
    assert_close(gates, probs / probs.sum(-1, keepdim=True), atol=1e-6)
    gates[0, 0].backward()
    assert router.weight.grad is not None and router.weight.grad[5].abs().sum() > 0


def test_seams_see_tokens_then_dispatched_rows_with_their_live_mask() -> None:
    seen: dict[str, tuple[Tensor, Tensor | None]] = {}

    class Recording(Experts):
        def quantize_input(self, site: str, x: Tensor, live: Tensor | None = None) -> Tensor:
            seen[site] = (x, live)
            return x

    experts = Recording(16, 12, 5)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 16)
    ids = torch.tensor([[4, 0], [1, 4], [0, 2]])
    live = torch.tensor([True, False, True])
    experts(x, ids, torch.full((3, 2), 0.5), live)
    assert_bitwise(seen["w13"][0], x)
    assert seen["w2"][0].shape == (6, 12)
    # rows by expert: 0 (tokens 0, 2), 1 (token 1), 2 (token 2), 4 (tokens 0, 1)
    assert seen["w2"][1] is not None and seen["w2"][1].tolist() == [True, True, False, True, True, False]
