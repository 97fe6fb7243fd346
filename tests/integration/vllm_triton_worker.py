"""Runs in a process with TRITON_INTERPRET=1 for test_vllm_triton.py: the GPU site against the plain-torch one."""

import torch

from quads.quant.matmul import SiteSpec
from quads.quant.tensor import QuantizedTensor
from quads.quant.triton import ops as kernels
from quads.rollout.sync import checksum
from quads.rollout.vllm.linear import PackedLinear
from quads.rollout.vllm.loading import Part
from quads.rollout.vllm.site import ReferenceSite
from quads.rollout.vllm.site_triton import TritonSite
from tests.helpers import assert_bitwise, assert_close

TOKENS, HIDDEN, WIDTH, EXPERTS, LIVE = 5, 96, 32, 3, 4
# Both round their result to bf16; the kernel also rounds the SwiGLU output there, before it is quantized again.
TOLERANCE = 2.0**-6
MASK = torch.arange(16) < LIVE


def pair(
    precision: str, shape: tuple[int, ...], parts: dict[str, Part], operand: str = "two"
) -> tuple[TritonSite, ReferenceSite]:
    spec = SiteSpec(precision, 0.5, "batch", "pow2", operand=operand)  # type: ignore[arg-type]
    sites = (cls("site", spec, shape, parts, torch.bfloat16) for cls in (TritonSite, ReferenceSite))
    return tuple(sites)  # type: ignore[return-value]


def check_linear(precision: str, operand: str, generator: torch.Generator) -> None:
    """q, k, v under each other; the second load goes to the same addresses."""
    rows = {"q": 48, "k": 32, "v": 32}
    parts = {member: Part(0, 0, n, HIDDEN) for member, n in rows.items()}
    triton, reference = pair(precision, (112, HIDDEN), parts, operand)
    addresses = {name: p.data_ptr() for name, p in triton.parameters().items()}
    for _ in range(2):
        for member, n in rows.items():
            weight = torch.randn(n, HIDDEN, generator=generator)
            for site in (triton, reference):
                site.loader.add(member, weight)
        assert checksum(triton.checkpoint()) == checksum(reference.checkpoint())
        x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
        y, expected = triton.linear(x, MASK), reference.linear(x, MASK)
        assert_close(y, expected, atol=TOLERANCE * float(expected.abs().max()))
    assert {name: p.data_ptr() for name, p in triton.parameters().items()} == addresses
    meta = torch.ops.vllm.quads_linear(
        torch.empty(7, HIDDEN, dtype=torch.bfloat16, device="meta"),
        *(p.to("meta") for p in triton.parameters().values()),
        MASK.to("meta"), 112, HIDDEN, "decoded", precision, 0.5, "batch", operand == "folded",
    )  # fmt: skip
    assert (meta.shape, meta.dtype) == ((7, 112), torch.bfloat16)


class Layer(torch.nn.Module):
    """A packed linear layer as vLLM's model holds it."""

    def __init__(self, site: TritonSite) -> None:
        super().__init__()
        self.quads_site = site
        for suffix, param in site.parameters().items():
            self.register_parameter("weight" + suffix, param)
        self.register_buffer("quads_live", MASK, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return PackedLinear(None, self.quads_site.spec).apply(self, x) + 1  # type: ignore[arg-type]


def check_trace(generator: torch.Generator) -> None:
    """Dynamo takes the layer whole, with a symbolic number of tokens, and the graph sees a later load."""
    site, _ = pair("w4a4_residual", (48, HIDDEN), {"whole": Part(0, 0, 48, HIDDEN)}, "auto")
    layer = Layer(site)
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    for tokens in (3, 5, 6):
        site.loader.add("whole", torch.randn(48, HIDDEN, generator=generator))
        x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
        assert_bitwise(compiled(x), layer(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def check_experts(precision: str, operand: str, generator: torch.Generator) -> None:
    """Experts that arrive one by one, gates and ups apart, against all of them in one packed tensor."""
    gate = Part(0, 0, WIDTH, HIDDEN)
    w13 = pair(precision, (EXPERTS, 2 * WIDTH, HIDDEN), {"w1": gate, "w3": gate}, operand)
    w2 = pair(
        "w4a4" if precision == "w4a4_residual" else precision,
        (EXPERTS, HIDDEN, WIDTH),
        {"w2": Part(0, 0, HIDDEN, WIDTH)},
        operand,
    )
    both, down = (
        torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator),
        torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator),
    )
    for e in (2, 0, 1):
        for shard, weight in (("w3", both[e, WIDTH:]), ("w1", both[e, :WIDTH])):
            w13[0].loader.add(shard, weight, e)
        w2[0].loader.add("w2", down[e], e)
    fused = QuantizedTensor.from_hp(both.bfloat16(), "nvfp4")
    w13[1].loader.add_fused(fused, [gate, Part(WIDTH, 0, WIDTH, HIDDEN)])
    w2[1].loader.add_fused(down, [Part(0, 0, HIDDEN, WIDTH)])
    for triton, reference in (w13, w2):
        assert checksum(triton.checkpoint()) == checksum(reference.checkpoint())
    assert_bitwise(w13[0].checkpoint().packed, fused.packed)  # type: ignore[attr-defined]
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    ids = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0]], dtype=torch.int32)
    gates = torch.rand(TOKENS, 2, generator=generator)
    y, expected = (w13[i].experts(w2[i], x, ids, gates, MASK) for i in range(2))
    assert_close(y[:LIVE], expected[:LIVE], atol=4 * TOLERANCE * float(expected.abs().max()))
    assert not y[LIVE:].any()  # padding reads no weights
    how = {"ratio": 0.5, "selection": "batch", "fold": operand == "folded", "live_T": MASK[:TOKENS]}
    ahead = kernels.quantize_ahead(x, w13[0].weight, precision, **how)  # type: ignore[arg-type]
    w13[0]._join = lambda x: ahead  # type: ignore[method-assign]
    assert_bitwise(w13[0].experts(w2[0], x, ids, gates, MASK), y)


if __name__ == "__main__":
    kinds = (("w4a16", "two"), ("w4a4", "two"), ("w4a4_residual", "two"), ("w4a4_residual", "folded"))
    for precision, operand in kinds:
        generator = torch.Generator().manual_seed(0)
        check_linear(precision, operand, generator)
        check_experts(precision, operand, generator)
    check_trace(torch.Generator().manual_seed(0))
    print("sites agree")
