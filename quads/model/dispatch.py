"""Expert parallelism: tokens travel to the processes that own their experts, and the results travel back.

With `ep` processes, process p owns experts p*E/ep .. (p+1)*E/ep - 1. One all-to-all tells each owner how many rows come
for each of its experts, one carries the rows, one carries the results back. Splits are uneven and no row is dropped; an
expert, or a whole process, may get none. A row's result does not depend on where its expert lives, and the weighted sum
over a token's experts runs on the token's own process in the same order as without expert parallelism.

    rows sorted by expert -> all-to-all -> [source, expert] order -> [expert, source] order -> experts -> all the way
    back

The backward pass of an all-to-all is the reverse all-to-all, so the owner of an expert ends with the gradient of all
tokens of its ep group: a sum, which must not be averaged again (see parallelize.py).

Shapes: T tokens, A experts a token, H hidden, E experts, R = T*A rows that this process sends, S rows that it receives,
L = E/ep experts that it owns, P = ep.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor

from quads.model.moe import Grouping, LocalDispatcher, inverse, take_rows


@dataclass
class ExchangedGrouping(Grouping):
    """Where the rows of this process went, and where those it computes came from.

    `order_R` is about the rows sent; `offsets_E` is that of the L local experts over the S rows received.
    """

    sent_P: list[int]  # rows to each process, sums to R
    received_P: list[int]  # rows from each process, sums to S
    regroup_S: Tensor  # int64: the row received as number regroup_S[s] is computed as row s


class AllToAllDispatcher(LocalDispatcher):
    """`LocalDispatcher` across the processes of `group`, each of which owns an equal share of the experts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)

    def dispatch(self, x_TH: Tensor, ids_TA: Tensor, num_experts: int) -> tuple[Tensor, ExchangedGrouping]:
        """Returns (x_SH, the rows for the local experts sorted by them, where they came from)."""
        x_RH, local = super().dispatch(x_TH, ids_TA, num_experts)
        counts_PL = torch.diff(local.offsets_E, prepend=local.offsets_E.new_zeros(1)).view(self.size, -1)
        received_PL = torch.empty_like(counts_PL)
        dist.all_to_all_single(received_PL, counts_PL, group=self.group)
        # The one place where the host waits: the sizes of what is sent and received must be known to post it.
        sent_P, received_P = torch.stack([counts_PL.sum(1), received_PL.sum(1)]).tolist()
        expert_PL = torch.arange(received_PL.shape[1], device=x_TH.device).expand_as(received_PL)
        expert_S = expert_PL.flatten().repeat_interleave(received_PL.flatten(), output_size=sum(received_P))
        grouping = ExchangedGrouping(
            order_R=local.order_R,
            offsets_E=received_PL.sum(0).cumsum(0, dtype=torch.int32),
            sent_P=sent_P,
            received_P=received_P,
            regroup_S=expert_S.argsort(stable=True),
        )
        return _permute(self._exchange(x_RH, received_P, sent_P), grouping.regroup_S), grouping

    def live_rows(self, live_T: Tensor | None, grouping: Grouping, top_k: int) -> Tensor | None:
        """The live mask of the rows received."""
        if live_T is None:
            return None
        assert isinstance(grouping, ExchangedGrouping)
        live_R = live_T.index_select(0, grouping.order_R // top_k).to(torch.uint8)
        live_S = torch.empty(sum(grouping.received_P), dtype=torch.uint8, device=live_R.device)
        dist.all_to_all_single(live_S, live_R, grouping.received_P, grouping.sent_P, group=self.group)
        return live_S.index_select(0, grouping.regroup_S).bool()

    def combine(self, y_SH: Tensor, gates_TA: Tensor, grouping: Grouping) -> Tensor:
        """The weighted sum over each token's experts, [T, H], on the process that the token came from."""
        assert isinstance(grouping, ExchangedGrouping)
        y_SH = _permute(y_SH, inverse(grouping.regroup_S))
        y_RH = self._exchange(y_SH, grouping.sent_P, grouping.received_P)
        return super().combine(y_RH, gates_TA, grouping)

    def _exchange(self, x: Tensor, out_splits: list[int], in_splits: list[int]) -> Tensor:
        """Differentiable all-to-all of rows; a plain, finished tensor comes back."""
        return wait_tensor(all_to_all_single_autograd(x, out_splits, in_splits, self.group))


def _permute(x_SH: Tensor, order_S: Tensor) -> Tensor:
    """x[order]; its backward is the inverse permutation, not a scatter."""
    return take_rows(x_SH, order_S, inverse(order_S)[:, None])
