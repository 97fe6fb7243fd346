"""Expert parallelism: tokens travel to the processes that own their experts, and the results travel back.

With `ep` processes, process p owns experts p*E/ep .. (p+1)*E/ep - 1. One all-to-all tells each owner how many rows come
for each of its experts, one carries the rows, one carries the results back. Splits are uneven and no row is dropped; an
expert, or a whole process, may get none. A row's result does not depend on where its expert lives, and the weighted sum
over a token's experts runs on the token's own process in the same order as without expert parallelism.

    rows sorted by expert, own experts last -> all-to-all -> [source, expert] order -> [expert, source] order -> experts
    -> all the way back

Rows for a process's own experts do not take part in the exchange: they lie last and are copied while the others travel.

The backward pass of an all-to-all is the reverse all-to-all, so the owner of an expert ends with the gradient of all
tokens of its ep group: a sum, which must not be averaged again (see parallelize.py).

Shapes: T tokens, A experts a token, H hidden, E experts, R = T*A rows that this process dispatches, S rows that it
computes, L = E/ep experts that it owns, P = ep; a dimension P has the other processes by rank, then this one.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

from quads.model.moe import Grouping, LocalDispatcher, take_rows


@torch.library.custom_op("quads::exchange_rows", mutates_args=())
def exchange_rows(x: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
    """All-to-all of the first rows of x: sent[p] to rank p, received[p] from it. The rows behind them stay here and
    come last. An operator, so that selective checkpointing can keep its result; backward is the reverse exchange."""
    x, num_received, num_sent = x.contiguous(), sum(received), sum(sent)
    process_group = _resolve_process_group(group)  # pyright: ignore[reportArgumentType]
    out = x.new_empty(num_received + x.shape[0] - num_sent, *x.shape[1:])
    work = dist.all_to_all_single(out[:num_received], x[:num_sent], received, sent, group=process_group, async_op=True)
    out[num_received:] = x[num_sent:]  # on a GPU beside the exchange
    assert work is not None
    work.wait()
    return out


def _remember_splits(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.received, ctx.sent, ctx.group = inputs


def _exchange_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return exchange_rows(grad, ctx.sent, ctx.received, ctx.group), None, None, None


exchange_rows.register_autograd(_exchange_back, setup_context=_remember_splits)


@dataclass
class ExchangedGrouping(Grouping):
    """Where the rows of this process went, and where those it computes came from.

    `order_R` is about the rows dispatched; `offsets_E` is that of the L local experts over the S rows computed.
    """

    sent: list[int]  # rows to each rank, 0 to its own
    received: list[int]  # rows from each rank, 0 from its own
    regroup_S: Tensor  # int64: the row that arrived as number regroup_S[s] is computed as row s
    place_S: Tensor  # int64, its inverse


class AllToAllDispatcher(LocalDispatcher):
    """`LocalDispatcher` across the processes of `group`, each of which owns an equal share of the experts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.group_name = group, group.group_name
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def sort(self, x_TH: Tensor, ids_TA: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """The grouping that a dispatch without exchange makes, but with the experts of this process last."""
        own = num_experts // self.size
        first, end = own * self.rank, own * (self.rank + 1)
        later_TA = torch.where(ids_TA < end, ids_TA + num_experts - end, ids_TA - own)
        return super().sort(x_TH, torch.where(ids_TA < first, ids_TA, later_TA), num_experts)

    def dispatch(self, x_TH: Tensor, ids_TA: Tensor, num_experts: int) -> tuple[Tensor, ExchangedGrouping]:
        """Returns (x_SH, the rows for the local experts sorted by them, where they came from)."""
        x_RH, local = super().dispatch(x_TH, ids_TA, num_experts)
        own = num_experts // self.size
        counts_E = torch.diff(local.offsets_E, prepend=local.offsets_E.new_zeros(1))
        others = self._by_rank([own] * (self.size - 1))
        received_E = exchange_rows(counts_E, others, others, self.group_name)
        received_PL = received_E.view(self.size, own)
        # The one place where the host waits: the sizes of what is sent and received must be known to post it.
        (*sent, kept), (*received, _) = torch.stack([counts_E.view(self.size, own).sum(1), received_PL.sum(1)]).tolist()
        regroup_S, place_S = regrouping(received_PL, sum(received) + kept)
        grouping = ExchangedGrouping(
            order_R=local.order_R,
            offsets_E=received_PL.sum(0).cumsum(0, dtype=torch.int32),
            sent=self._by_rank(sent),
            received=self._by_rank(received),
            regroup_S=regroup_S,
            place_S=place_S,
        )
        x_SH = exchange_rows(x_RH, grouping.received, grouping.sent, self.group_name)
        return take_rows(x_SH, regroup_S, place_S[:, None]), grouping

    def live_rows(self, live_T: Tensor | None, grouping: Grouping, top_k: int) -> Tensor | None:
        """The live mask of the rows received."""
        if live_T is None:
            return None
        assert isinstance(grouping, ExchangedGrouping)
        live_R = live_T.index_select(0, grouping.order_R // top_k).to(torch.uint8)
        live_S = exchange_rows(live_R, grouping.received, grouping.sent, self.group_name)
        return live_S.index_select(0, grouping.regroup_S).bool()

    def combine(self, y_SH: Tensor, gates_TA: Tensor, grouping: Grouping) -> Tensor:
        """The weighted sum over each token's experts, [T, H], on the process that the token came from."""
        assert isinstance(grouping, ExchangedGrouping)
        y_SH = take_rows(y_SH, grouping.place_S, grouping.regroup_S[:, None])
        y_RH = exchange_rows(y_SH, grouping.sent, grouping.received, self.group_name)
        return super().combine(y_RH, gates_TA, grouping)

    def _by_rank(self, others: list[int]) -> list[int]:
        """What concerns the other ranks, with a 0 for this one."""
        return [*others[: self.rank], 0, *others[self.rank :]]


def regrouping(received_PL: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """From [source, expert] order to [expert, source] order: (the row to take as row s, where row s goes), int64 [S].

    Both keep the rows of one source and expert together, so each row moves by the distance of its segment.
    """
    counts_LP = received_PL.t()
    before_PL = (received_PL.flatten().cumsum(0) - received_PL.flatten()).view_as(received_PL)
    after_LP = (counts_LP.flatten().cumsum(0) - counts_LP.flatten()).view_as(counts_LP)
    distance_LP = before_PL.t() - after_LP
    row_S = torch.arange(num_rows, device=received_PL.device)

    def moved(distance: Tensor, counts: Tensor) -> Tensor:
        return row_S + distance.flatten().repeat_interleave(counts.flatten(), output_size=num_rows)

    return moved(distance_LP, counts_LP), moved(-distance_LP.t(), received_PL)
