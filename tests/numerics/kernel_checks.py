"""What a Triton kernel must give, for any device: the interpreter tests and the GPU tests call the same checks.

Codes, scales and masks are compared bit for bit with quads.quant.nvfp4 and residual on the CPU. GEMM outputs are
compared with float64 sums of the same operands; see `tolerance`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from quads.quant import nvfp4, residual
from quads.quant.triton import ops as kernels
from quads.quant.triton import pack as kernels_pack
from quads.quant.triton.activations import Compensation, quantize_activations
from quads.quant.triton.layout import activation_order, padded, tile


def same_bits(got: Tensor, want: Tensor) -> bool:
    """Equal bit for bit, NaN equal to NaN; fp32."""
    got, want = got.cpu().float(), want.cpu().float()
    same = (got.view(torch.int32) == want.view(torch.int32)) | (got.isnan() & want.isnan())
    return got.shape == want.shape and bool(same.all())


def awkward_rows(rows: int, k: int) -> Tensor:
    """Rows of very different sizes; the first ones are special where there are enough: zero, NaN, Inf, -0.0, tiny."""
    x = torch.randn(rows, k) * torch.randn(rows, 1).mul(3).exp()
    if rows > 5:
        x[0] = 0.0
        x[1, k // 2] = torch.nan
        x[2, 0] = -torch.inf
        x[3, ::3] = -0.0
        x[4] *= 1e-41 / x[4].abs().max()
    return x


def check_weight_quantizer(
    shape: tuple[int, ...], mode: nvfp4.GlobalScaleMode, device: str, dtype: torch.dtype = torch.float32
) -> None:
    x = awkward_rows(_numel(shape[:-1]), shape[-1]).view(shape).to(dtype)
    if len(shape) == 3:
        g, gs = nvfp4.global_scale(nvfp4.finite_amax(x.float(), dim=(1, 2)), mode)
    else:
        g, gs = nvfp4.global_scale(nvfp4.finite_amax(x.float()), mode)
    packed, block_scale, _ = nvfp4.quantize(x, g, gs=gs)
    got_packed, got_scale, got_g = kernels.quantize(x.to(device), mode=mode)
    assert torch.equal(got_packed.cpu(), packed)
    assert torch.equal(got_scale.cpu().view(torch.uint8), block_scale.view(torch.uint8))
    assert same_bits(got_g.flatten(), g.flatten())
    want = nvfp4.dequantize(packed, block_scale, g, num_elements=shape[-1])
    assert same_bits(kernels.dequantize(got_packed, got_scale, got_g, num_elements=shape[-1]), want)
    assert same_bits(kernels.qdq(x.to(device), mode=mode), want)
    assert same_bits(kernels.qdq(x.to(device), mode=mode, dtype=torch.bfloat16), want.to(torch.bfloat16))
    for cast, stored in zip(
        kernels.quantize(x.to(device), mode=mode, cast=True),
        kernels.quantize(x.to(device).bfloat16(), mode=mode),
        strict=True,
    ):
        assert torch.equal(cast.reshape(-1).view(torch.uint8), stored.reshape(-1).view(torch.uint8))
    if shape[-1] % 16 == 0:  # codes and scales of a row side by side
        rows = torch.empty(*shape[:-1], shape[-1] // 16 * 9, dtype=torch.uint8, device=device)
        kernels_pack.quantize_rows_into(x.to(device), g.to(device), mode, gs.to(device), rows, cast=False)
        assert torch.equal(rows.cpu(), torch.cat([packed, block_scale.view(torch.uint8)], dim=-1))
        out = torch.empty(shape, device=device)
        kernels_pack.dequantize_rows_into(rows, g.to(device), out)
        assert same_bits(out, want)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def check_activation_quantizer(
    rows: int, k: int, selection: residual.Selection, ratio: float, device: str, dtype: torch.dtype = torch.float32
) -> None:
    """Codes of both operands, mask, and the decoded values in both input orders."""
    x = awkward_rows(rows, k).to(dtype)
    live = torch.rand(rows) < 0.8
    want = residual.compensate_packed(x, ratio, selection, live)
    got = kernels.compensate_packed(x.to(device), ratio, selection, live.to(device))
    assert torch.equal(got.mask.cpu(), want.mask)
    for got_part, want_part in zip((*got.main, *got.residual), (*want.main, *want.residual), strict=True):
        assert torch.equal(got_part.cpu().view(torch.uint8), want_part.view(torch.uint8))

    order = activation_order(k)
    pad = (0, padded(k) - k)
    want_values = [F.pad(part, pad)[:, order] for part in residual.compensate(x, ratio, selection, live)]
    for stored in (False, True):
        given = F.pad(x, pad)[:, order].contiguous() if stored else x
        operand, _ = quantize_activations(
            given.to(device), k, Compensation(ratio, selection), live.to(device).view(torch.uint8), stored=stored
        )
        values = operand.data.cpu().float() * operand.scale.cpu().unsqueeze(-1)
        # + 0.0: in a block whose scale is 0, or for x = -0.0, the operand may hold -0.0
        assert same_bits(values[:rows] + 0.0, want_values[0] + 0.0)
        assert same_bits(values[rows:] + 0.0, want_values[1] + 0.0)

    want_folded, want_scale = residual.compensate_folded(x, ratio, selection, live)
    for stored in (False, True):
        given = F.pad(x, pad)[:, order].contiguous() if stored else x
        how = Compensation(ratio, selection, fold=True)
        operand, _ = quantize_activations(given.to(device), k, how, live.to(device).view(torch.uint8), stored=stored)
        assert operand.data.dtype == torch.float16 and not operand.residual
        assert same_bits(operand.data + 0.0, F.pad(want_folded, pad)[:, order] + 0.0)
        assert same_bits(operand.scale, want_scale.flatten())


def packed_weight(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """A random NVFP4 weight with one global scale a matrix; includes zero and subnormal block scales."""
    w = torch.randn(shape) * torch.randn(*shape[:-1], 1).mul(2).exp()
    w[..., :16] *= 2.0**-14
    return nvfp4.quantize(w, nvfp4.global_scale(nvfp4.finite_amax(w, dim=(-1, -2)))[0])


def check_row_codes(rows: int, k: int, device: str) -> None:
    """Packed activations without a residual, bf16: the kernel that gives a block to a thread."""
    x = awkward_rows(rows, k).bfloat16()
    want = nvfp4.quantize_rows(x)
    operand, mask = quantize_activations(x.to(device), k, codes=True)
    assert mask is None and operand.block_scale is not None and operand.scale is not None
    assert torch.equal(operand.data.cpu(), want[0])
    assert torch.equal(operand.block_scale.cpu(), want[1].view(torch.uint8))
    assert same_bits(operand.scale, want[2].flatten())


def check_codes_of_every_bfloat16(device: str, scales: int) -> None:
    """All 65536 values beside block maxima of many sizes, so that every rounding boundary is met."""
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    blocks = values.view(-1, 8).repeat(scales, 1)
    maxima = torch.randn(blocks.shape[0], 8).mul(3).exp().bfloat16() * blocks.abs()
    x = torch.cat([blocks, torch.where(maxima.isfinite(), maxima, 1.0)], dim=1).view(scales, -1, 64)
    g = 2.0 ** torch.linspace(-20, 10, scales).round().view(scales, 1, 1)
    packed, block_scale, _ = nvfp4.quantize(x, g)
    got = kernels.quantize(x.to(device), g.to(device))
    assert torch.equal(got[0].cpu(), packed) and torch.equal(
        got[1].cpu().view(torch.uint8), block_scale.view(torch.uint8)
    )


def check_quantize_in_place(shape: tuple[int, ...], swiglu: bool, mode: nvfp4.GlobalScaleMode, device: str) -> None:
    """Values written straight into a kernel's layout against the same values quantized, packed and loaded."""
    for dtype in (torch.float32, torch.bfloat16):
        x = awkward_rows(_numel(shape[:-1]), shape[-1]).view(shape).to(dtype)
        g, gs = nvfp4.global_scale(nvfp4.finite_amax(x.float(), dim=(-1, -2)), mode)
        packed, block_scale, _ = nvfp4.quantize(x, g, gs=gs)
        for path in ("decoded", "native_fp4"):
            weight = kernels.KernelWeight(shape, path=path, swiglu=swiglu, device=device)
            places = weight.words.data_ptr(), weight.scales.data_ptr(), weight.g.data_ptr()
            weight.words.fill_(77)
            weight.quantize_(x.to(device), mode=mode)
            got = weight.to_packed()
            assert torch.equal(got[0].cpu(), packed) and same_bits(got[2].flatten(), g.flatten())
            assert torch.equal(got[1].cpu().view(torch.uint8), block_scale.view(torch.uint8))
            assert places == (weight.words.data_ptr(), weight.scales.data_ptr(), weight.g.data_ptr())
            if path == "decoded":
                words, scales = tile(
                    packed.view(-1, *packed.shape[-2:]), block_scale.view(-1, *block_scale.shape[-2:]), swiglu
                )
                assert torch.equal(weight.words.cpu(), words) and torch.equal(weight.scales.cpu(), scales)


def check_quantize_parts_in_place(device: str) -> None:
    """Experts one by one, and the rows of a fused projection, give what the whole gives."""
    x = torch.randn(3, 64, 48).bfloat16().to(device)
    whole = kernels.KernelWeight(x.shape, swiglu=True, device=device).quantize_(x)
    parts = kernels.KernelWeight(x.shape, swiglu=True, device=device)
    for expert in range(3):
        parts.quantize_(x[expert : expert + 1], whole.g[expert], expert=expert)
    fused = torch.randn(300, 144).bfloat16().to(device)
    rows = kernels.KernelWeight(fused.shape, device=device).quantize_(fused)
    by_rows = kernels.KernelWeight(fused.shape, device=device)
    by_rows.quantize_(fused[:256], rows.g).quantize_(fused[256:], rows.g, row=256)
    for one, other in ((whole, parts), (rows, by_rows)):
        assert torch.equal(one.words, other.words) and torch.equal(one.scales, other.scales)
        assert torch.equal(one.g, other.g)


def operands(
    x: Tensor,
    precision: str,
    ratio: float,
    selection: residual.Selection,
    live: Tensor | None,
    fold: bool = False,
) -> list[Tensor]:
    """[main], [main, residual] or [folded] in float64."""
    if precision == "w4a16":
        return [x.double()]
    if precision == "w4a4":
        return [nvfp4.qdq_rows(x).double()]
    if fold:
        operand, scale = residual.compensate_folded(x, ratio, selection, live)
        return [operand.double() * scale.double()]
    return [part.double() for part in residual.compensate(x, ratio, selection, live)]


def tolerance(main: list[Tensor], w: Tensor) -> Tensor:
    """Bound of |fp32-accumulated - exact| before the bf16 rounding, [T, N].

    Each product is exact in fp32. A sum of n terms in fp32, in any order, errs by at most (n - 1) u sum |terms|, with
    u = 2**-24 for round to nearest; tensor cores truncate instead, u = 2**-23, and keep at least 23 bits inside an
    MMA. n <= 2 K. Scaling by the two global scales and subtracting the halves add 3 u.
    """
    terms = sum(part.abs() @ w.abs().T for part in main)
    return (2 * w.shape[-1] + 3) * 2.0**-23 * terms


def product(main: list[Tensor], w: Tensor) -> Tensor:
    first, *rest = (part @ w.T for part in main)
    return first - rest[0] if rest else first


def assert_close(got: Tensor, want: Tensor, bound: Tensor) -> None:
    """got bf16 against float64: the bound, and half a bf16 ulp (2**-8 relative covers it at both ends of a binade)."""
    got = got.cpu().double()
    assert bool(((got - want).abs() <= bound + 2.0**-8 * want.abs() + 1e-38).all()), float((got - want).abs().max())


def check_linear(
    rows: int,
    n: int,
    k: int,
    precision: str,
    selection: residual.Selection,
    device: str,
    path: str = "decoded",
    fold: bool = False,
) -> None:
    packed, block_scale, g = packed_weight((n, k))
    x = torch.randn(rows, k).bfloat16()
    live = torch.rand(rows) < 0.8
    weight = kernels.KernelWeight.from_packed(packed.to(device), block_scale.to(device), g.to(device), path=path)
    got = kernels.linear(
        x.to(device), weight, precision, ratio=0.5, selection=selection, fold=fold, live_T=live.to(device)
    )
    main = operands(x, precision, 0.5, selection, live, fold)
    w = nvfp4.dequantize(packed, block_scale, g).double()
    assert_close(got, product(main, w), tolerance(main, w))


def check_every_code_and_scale(device: str, fold: bool) -> None:
    """The decoders of the GEMM: rows of the identity times 6 give 6 w, exactly, for each code under each scale byte at
    many places of a word; the NaN scale gives NaN. fold: the decoder to fp16, else to bfloat16."""
    byte = torch.arange(128, dtype=torch.uint8)
    codes = (torch.arange(128)[:, None] * 3 + torch.arange(128) + torch.arange(128) // 16).to(torch.uint8) % 16
    codes[byte == 0] = 0  # scale 0 goes with code 0
    scale = byte[:, None].expand(128, 8).contiguous().view(torch.float8_e4m3fn)
    weight = nvfp4.pack_codes(codes), scale, torch.ones(())
    kernel_weight = kernels.KernelWeight.from_packed(*(part.to(device) for part in weight))
    x = 6 * torch.eye(128, dtype=torch.bfloat16, device=device)
    precision = "w4a4_residual" if fold else "w4a4"
    got = kernels.linear(x, kernel_weight, precision, selection="all", fold=fold)
    want = 6 * nvfp4.dequantize(*weight).T
    assert same_bits(got + 0.0, want + 0.0) and bool(want[:, 127].isnan().all())


def reference_moe(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    ids: Tensor,
    gates: Tensor,
    precision: str,
    sites: tuple[str, ...],
    live: Tensor,
    fold: bool,
) -> tuple[Tensor, Tensor]:
    """Plain loop over tokens and choices, with the roundings of bf16 tensors; (y, sum over a token's experts of
    |gate| * max |y_e|) float64. Selection "token", so that every row stands alone."""
    at = {site: "w4a4" if precision == "w4a4_residual" and site not in sites else precision for site in ("w13", "w2")}
    main = operands(x, at["w13"], 0.5, "token", None, fold)
    out = torch.zeros(x.shape[0], w2.shape[1], dtype=torch.float64)
    size = torch.zeros(x.shape[0], dtype=torch.float64)
    for t in range(x.shape[0]):
        for a in range(ids.shape[1] if live[t] else 0):
            e = int(ids[t, a])
            gate, up = product([part[t : t + 1] for part in main], w13[e].double()).bfloat16().chunk(2, dim=-1)
            h = operands(F.silu(gate) * up, at["w2"], 0.5, "token", None, fold)
            y = product(h, w2[e].double()).bfloat16()
            out[t] += (y[0] * gates[t, a]).double()
            size[t] += float(gates[t, a].abs()) * float(y.abs().max())
    return out, size


def check_moe(
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    width: int,
    precision: str,
    device: str,
    path: str = "decoded",
    one_expert: bool = False,
    sites: tuple[str, ...] = ("w13", "w2"),
    tolerance: float = 0.02,
    fold: bool = False,
    skewed: bool = False,
) -> None:
    """Expert layer against the plain loop.

    The bf16 roundings inside (gate, up, h) may fall the other way after fp32 accumulation, and codes of h may then
    flip, so the bound is relative to the size of the expert outputs: a flipped code moves one of `width` terms by up to
    a sixth of it; a few of them stay under 2 %. A wrong row, expert or gate is off by 100 %.
    """
    w13, w2 = packed_weight((experts, 2 * width, hidden)), packed_weight((experts, hidden, width))
    x = torch.randn(tokens, hidden).bfloat16()
    live = torch.rand(tokens) < 0.8
    live[0] = True
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
    if one_expert:
        ids[:] = experts - 1
    if skewed:  # most tokens at two experts
        ids[: tokens * 3 // 4] = torch.arange(top_k) % experts
    gates = torch.rand(tokens, top_k).bfloat16()
    on = [tuple(part.to(device) for part in weight) for weight in (w13, w2)]
    got = kernels.moe(
        x.to(device),
        kernels.KernelWeight.from_packed(*on[0], path=path, swiglu=True),
        kernels.KernelWeight.from_packed(*on[1], path=path),
        ids.to(device),
        gates.to(device),
        precision,
        residual_sites=sites,
        selection="token",
        fold=fold,
        live_T=live.to(device),
    )
    full = nvfp4.dequantize(*w13), nvfp4.dequantize(*w2)
    want, size = reference_moe(x, *full, ids, gates, precision, sites, live, fold)
    error = (got.cpu().double() - want).abs().amax(-1)
    assert bool((error <= tolerance * size).all()), (error / size.clamp(min=1e-30)).max()
    assert bool((got.cpu()[~live] == 0).all())
