"""docs/tour.md: its snippets run, its table is right, and every function it sends the reader to is where it says."""

import doctest
import re

import torch

from quads.quant import nvfp4
from tests.helpers import REPOSITORY

PAGE = (REPOSITORY / "docs" / "tour.md").read_text(encoding="utf-8")


def test_snippets_run_in_their_order() -> None:
    """Outputs are compared as text; the snippets share one namespace, as they do for the reader."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 5
    parser, runner, shared = doctest.DocTestParser(), doctest.DocTestRunner(), {}
    for number, block in enumerate(blocks):
        test = parser.get_doctest(block, {}, f"snippet {number}", "tour.md", 0)
        assert test.examples
        test.globs = shared
        report: list[str] = []
        assert runner.run(test, out=report.append, clear_globs=False).failed == 0, "".join(report)


def test_block_by_hand() -> None:
    rows = re.findall(r"^\| (-?[\d.]+) \| (-?[\d.]+) \| (\d+) \| (-?[\d.]+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 16
    x = torch.tensor([float(row[0]) for row in rows])
    g, gs = nvfp4.global_scale(torch.tensor(2000.0))
    packed, sf, _ = nvfp4.quantize(x, g, gs=gs)
    assert (g.item(), sf.float().item()) == (1.0, 1.75)
    assert [str(round(v / 1.75, 3)) for v in (float(row[0]) for row in rows)] == [row[1] for row in rows]
    assert nvfp4.unpack_codes(packed).tolist() == [int(row[2]) for row in rows]
    assert [str(v) for v in nvfp4.dequantize(packed, sf, g).tolist()] == [row[3] for row in rows]
    assert f"`{packed.numpy().tobytes().hex(' ')}`" in PAGE
    outlier = torch.tensor([2000.0] + 15 * [0.0])
    assert nvfp4.dequantize(*nvfp4.quantize(outlier, g, gs=gs)[:2], g)[0].item() == 1920.0


def test_every_link_leads_to_the_function_it_names() -> None:
    links = re.findall(r"\[`([\w.]+)`\]\(\.\./([\w./]+)\)", PAGE)
    assert len(links) > 25
    for name, path in links:
        file = REPOSITORY / path
        assert file.is_file(), path
        if name != file.name:
            text = file.read_text(encoding="utf-8")
            for part in name.split("."):
                assert re.search(rf"^\s*(def|class) {part}\b", text, re.MULTILINE), f"{name} is not in {path}"


def test_files_and_config_keys_it_mentions_exist() -> None:
    from quads.config import load_config

    for path in re.findall(r"(?<![\w/.])((?:quads|configs|tests|docs)/[\w./]+\.\w+)", PAGE):
        assert (REPOSITORY / path).is_file(), path
    for line in re.findall(r"^- `(--[^`]+)`", PAGE, re.MULTILINE):
        load_config(["--config", str(REPOSITORY / "configs" / "tiny_quads.toml"), *line.split()])
