"""The mixture of experts: an fp32 router, SwiGLU experts with seams for low precision, and the dispatch between them.

    router    p = softmax(x W_r^T) in fp32; a token goes to its top_k experts; the gates are p at those experts,
              renormalised to sum to one when `norm_topk_prob`
    expert e  y = (silu(x W_gate^T) * (x W_up^T)) W_down^T
    output    sum over the chosen experts of gate * y

Rows are sorted by expert, so that each expert's weights meet its rows in one matmul. The sum over a token's experts
runs in the order of its own top-k list, so it does not depend on the other tokens of the batch. Router replay: given
expert ids are used instead of the top-k, and the gates are gathered from the live router probabilities, so that the
router keeps its gradient.

Left out: auxiliary balance losses (RL fine-tunes a balanced router) and shared experts (Qwen3-MoE has none).

Shapes: T tokens, H hidden, E experts, A experts a token (top_k), R = T*A dispatched rows, I expert width.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ExpertSite = Literal["w13", "w2"]
MatmulMode = Literal["grouped", "loop"]


class Router(nn.Module):
    """Chooses experts. The weight is rounded to the activation dtype (what a rollout stores) and then used in fp32."""

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, norm_topk_prob: bool) -> None:
        super().__init__()
        self.top_k = top_k
        self.norm_topk_prob = norm_topk_prob
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))

    def forward(self, x_TH: Tensor, replay_TA: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns (expert ids int64 [T, A], gates [T, A] in the dtype of x).

        Rows of `replay_TA` that hold a negative id (a position that was not recorded) choose for themselves.
        """
        wide = torch.float64 if x_TH.dtype == torch.float64 else torch.float32
        logits_TE = F.linear(x_TH.to(wide), self.weight.to(x_TH.dtype).to(wide))
        probs_TE = logits_TE.softmax(dim=-1)
        ids_TA = probs_TE.detach().topk(self.top_k, dim=-1).indices
        if replay_TA is not None:
            replay_TA = replay_TA.to(torch.int64)
            ids_TA = torch.where((replay_TA >= 0).all(dim=-1, keepdim=True), replay_TA, ids_TA)
        gates_TA = probs_TE.gather(-1, ids_TA)
        if self.norm_topk_prob:
            gates_TA = gates_TA / gates_TA.sum(dim=-1, keepdim=True)
        return ids_TA, gates_TA.to(x_TH.dtype)

    @torch.no_grad()
    def own_choice(self, x_TH: Tensor) -> Tensor:
        """The expert ids int64 [T, A] that it would take without a replay."""
        return self(x_TH)[0]


@dataclass
class Grouping:
    """Where each dispatched row came from."""

    order_R: Tensor  # int64, row r holds the flat (token, choice) pair order_R[r] = t * A + a
    offsets_E: Tensor  # int32, end of each expert's rows; the last one is R


class _TakeRows(torch.autograd.Function):
    """x[index], where row t of x went to the rows places[t]. Backward gathers and adds those up in order; autograd's
    own would scatter with atomic additions, whose order, and so the rounding in bf16, changes from run to run."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, index_R: Tensor, places_TC: Tensor) -> Tensor:
        ctx.save_for_backward(places_TC)
        return x_TH.index_select(0, index_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (places_TC,) = ctx.saved_tensors
        grad_TCH = grads[0].index_select(0, places_TC.flatten()).unflatten(0, places_TC.shape)
        return grad_TCH.squeeze(1) if places_TC.shape[1] == 1 else grad_TCH.sum(1), None, None


def take_rows(x_TH: Tensor, index_R: Tensor, places_TC: Tensor) -> Tensor:
    """x[index_R]; `places_TC` lists, for each row of x, where it went."""
    taken = _TakeRows.apply(x_TH, index_R, places_TC)
    assert isinstance(taken, Tensor)
    return taken


def inverse(order_R: Tensor) -> Tensor:
    """The permutation that undoes `order_R`."""
    place_R = torch.empty_like(order_R)
    place_R[order_R] = torch.arange(order_R.shape[0], device=order_R.device)
    return place_R


class LocalDispatcher:
    """Sorts rows by expert and puts them back. An expert-parallel dispatcher has the same methods.

    `sort` and `weigh` are plain functions of tensors, methods so that a compiler can take their place.
    """

    def dispatch(self, x_TH: Tensor, ids_TA: Tensor, num_experts: int) -> tuple[Tensor, Grouping]:
        """Returns (x_RH sorted by expert, where the rows came from)."""
        x_RH, order_R, offsets_E = self.sort(x_TH, ids_TA, num_experts)
        return x_RH, Grouping(order_R, offsets_E)

    def live_rows(self, live_T: Tensor | None, grouping: Grouping, top_k: int) -> Tensor | None:
        """The live mask of the dispatched rows."""
        return None if live_T is None else live_T.index_select(0, grouping.order_R // top_k)

    def combine(self, y_RH: Tensor, gates_TA: Tensor, grouping: Grouping) -> Tensor:
        """The weighted sum over each token's experts, [T, H]."""
        return self.weigh(y_RH, gates_TA, grouping.order_R)

    def sort(self, x_TH: Tensor, ids_TA: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """(x_RH sorted by expert, order_R, offsets_E): see `Grouping`."""
        flat_R = ids_TA.flatten()
        order_R = flat_R.argsort(stable=True)
        counts_E = torch.zeros(num_experts, dtype=torch.int32, device=flat_R.device)
        counts_E.index_add_(0, flat_R, torch.ones_like(flat_R, dtype=torch.int32))
        x_RH = take_rows(x_TH, order_R // ids_TA.shape[1], inverse(order_R).view_as(ids_TA))
        return x_RH, order_R, counts_E.cumsum(0, dtype=torch.int32)

    def weigh(self, y_RH: Tensor, gates_TA: Tensor, order_R: Tensor) -> Tensor:
        """sum_a gates[t, a] * (the row of y that is choice a of token t), [T, H]."""
        y_TAH = take_rows(y_RH, inverse(order_R), order_R[:, None]).unflatten(0, gates_TA.shape)
        return (y_TAH * gates_TA.unsqueeze(-1)).sum(dim=1)


def matmul_mode(x_RK: Tensor, w_ENK: Tensor) -> MatmulMode:
    """The mode that serves these operands: "grouped" where torch has the kernel, else "loop".

    torch.nn.functional.grouped_mm takes bf16, fp16 and fp32 (not float64) and wants rows of a multiple of 16 bytes.
    """
    row_bytes = x_RK.element_size()
    aligned = all(size * row_bytes % 16 == 0 for size in w_ENK.shape[1:])
    return "grouped" if aligned and x_RK.dtype != torch.float64 else "loop"


def expert_matmul(x_RK: Tensor, w_ENK: Tensor, offsets_E: Tensor, mode: MatmulMode) -> Tensor:
    """y[r] = w[e] @ x[r] for the rows r of expert e, [R, N]. Rows are sorted by expert; `offsets_E[-1]` must equal R.

    "loop" is the reference: one matmul an expert. It copies the offsets to the host.
    """
    if mode == "grouped":
        return F.grouped_mm(x_RK, w_ENK.transpose(1, 2), offs=offsets_E)
    ends = offsets_E.tolist()
    groups = zip([0, *ends], ends, w_ENK.unbind(0), strict=False)  # the last end starts no group
    return torch.cat([x_RK[start:end] @ w_NK.t() for start, end, w_NK in groups])


def local_experts(weight: Tensor) -> Tensor:
    """The experts of this process as a plain tensor: under expert parallelism a parameter is sharded over them."""
    to_local = getattr(weight, "to_local", None)
    return weight if to_local is None else to_local()


class Experts(nn.Module):
    """All experts of a layer in two fused parameters: gate_up_proj [E, 2I, H], gate rows first, and down_proj [E, H,
    I].

    Seams, as in `Linear`: `effective_weights` and `quantize_input`. Site "w13" sees the tokens before dispatch, so that
    each is quantized once and one selection of channels holds for all; site "w2" sees the dispatched rows.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.dispatcher = LocalDispatcher()

    def effective_weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(w13 [E, 2I, H], w2 [E, H, I]) that the matmuls multiply, in the activation dtype."""
        return local_experts(self.gate_up_proj).to(dtype), local_experts(self.down_proj).to(dtype)

    def quantize_input(self, site: ExpertSite, x: Tensor, live: Tensor | None = None) -> Tensor:
        """The activation that the matmul of `site` multiplies, same shape; `live` (bool) is False for padding rows."""
        return x

    def forward(self, x_TH: Tensor, ids_TA: Tensor, gates_TA: Tensor, live_T: Tensor | None = None) -> Tensor:
        x_TH = self.quantize_input("w13", x_TH, live_T)
        x_RH, grouping = self.dispatcher.dispatch(x_TH, ids_TA, self.num_experts)
        live_R = self.dispatcher.live_rows(live_T, grouping, ids_TA.shape[1])
        y_RH = self.compute(x_RH, *self.effective_weights(x_RH.dtype), grouping.offsets_E, live_R)
        return self.dispatcher.combine(y_RH, gates_TA, grouping)

    def compute(
        self, x_RH: Tensor, w13_E2IH: Tensor, w2_EHI: Tensor, offsets_E: Tensor, live_R: Tensor | None = None
    ) -> Tensor:
        """The experts themselves on rows sorted by expert, [R, H]. What a compiler gets: plain tensors, no exchange."""
        gate_up_R2I = expert_matmul(x_RH, w13_E2IH, offsets_E, matmul_mode(x_RH, w13_E2IH))
        gate_RI, up_RI = gate_up_R2I.chunk(2, dim=-1)
        h_RI = self.quantize_input("w2", F.silu(gate_RI) * up_RI, live_R)
        return expert_matmul(h_RI, w2_EHI, offsets_E, matmul_mode(h_RI, w2_EHI))

    def extra_repr(self) -> str:
        experts, width, hidden = self.num_experts, self.down_proj.shape[2], self.down_proj.shape[1]
        return f"{experts} experts of {width}, hidden {hidden}"


class MoE(nn.Module):
    """Router and experts, under Hugging Face's names."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        norm_topk_prob: bool,
    ) -> None:
        super().__init__()
        self.gate = Router(hidden_size, num_experts, top_k, norm_topk_prob)
        self.experts = Experts(hidden_size, intermediate_size, num_experts)

    def forward(
        self, x_TH: Tensor, live_T: Tensor | None = None, replay_TA: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns (y_TH, the expert ids used int64 [T, A])."""
        ids_TA, gates_TA = self.gate(x_TH, replay_TA)
        return self.experts(x_TH, ids_TA, gates_TA, live_T), ids_TA
