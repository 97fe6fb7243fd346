"""The block that quads/quant/README.md works by hand, and its Python."""

import re

import torch

from quads.quant import nvfp4
from tests.helpers import REPOSITORY

PAGE = (REPOSITORY / "quads" / "quant" / "README.md").read_text(encoding="utf-8")


def test_table():
    rows = re.findall(r"^\| (-?[\d.]+) \| (-?[\d.]+) \| (\d+) \| (-?[\d.]+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 16
    x = torch.tensor([float(row[0]) for row in rows])
    packed, sf, g = nvfp4.quantize(x)
    assert (sf.float().item(), g.item()) == (256.0, 2.0**-9)
    assert [str(round(v / 0.5, 4)) for v in x.double().tolist()] == [row[1] for row in rows]
    assert nvfp4.unpack_codes(packed).tolist() == [int(row[2]) for row in rows]
    assert [str(v) for v in nvfp4.dequantize(packed, sf, g).tolist()] == [row[3] for row in rows]
    assert f"`{packed.numpy().tobytes().hex(' ')}`" in PAGE


def test_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    first, second = capsys.readouterr().out.splitlines()
    assert first == "77 66 56 44 12 80 cb 00 [256.0] 0.001953125"
    assert second.startswith("[3.0, 3.0, 2.0,") and second.endswith("-0.75, -1.0, 0.0, 0.0]")
