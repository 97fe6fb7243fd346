"""docs/tour.md: its snippets run, its table is right, and every function it sends the reader to is where it says."""

import doctest
import re
import sys
from collections.abc import Callable
from types import FrameType

import torch

from quads.config.sections import QuantSettings, RolloutSettings
from quads.model.config import ARCHITECTURES
from quads.model.model import MoEDecoder
from quads.quant import nvfp4
from quads.quant.convert import convert_learner
from quads.quant.masters import requantize
from quads.quant.recipes import resolve
from quads.rollout.native.engine import NativeEngine
from quads.rollout.sync import sync
from tests.helpers import REPOSITORY

PAGE = (REPOSITORY / "docs" / "tour.md").read_text(encoding="utf-8")


def test_snippets_run_in_their_order() -> None:
    """Outputs are compared as text; the snippets share one namespace, as they do for the reader."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 6
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


def walk() -> list[list[tuple[str, str]]]:
    """The two legs of the way of one weight: (function, file) in the order of the page."""
    section = PAGE.partition("The way of one weight")[2].partition("With `rollout.verify_sync")[0]
    tables = re.split(r"^\| at the sync", section, flags=re.MULTILINE)
    return [re.findall(r"^\| \[`([\w.]+)`\]\(\.\./([\w./]+)\)", table, re.MULTILINE) for table in tables]


def test_the_way_of_one_weight_is_short_and_never_returns() -> None:
    legs = walk()
    assert sum(map(len, legs)) == 10 and len({file for leg in legs for _, file in leg}) == 5
    for leg in legs:
        entered = [file for i, (_, file) in enumerate(leg) if i == 0 or leg[i - 1][1] != file]
        assert len(entered) == len(set(entered)), entered


def test_one_weight_goes_that_way() -> None:
    """The functions of each leg are called in the order of the page, other weights in between."""
    spec = resolve(QuantSettings())
    config = ARCHITECTURES["tiny"]
    learner = MoEDecoder(config)
    learner.init_weights(torch.Generator().manual_seed(0))
    convert_learner(learner, spec)
    rollout = RolloutSettings(max_batch=1, max_prompt_tokens=4, max_new_tokens=4)
    engine = NativeEngine(config, spec, rollout, torch.float32, "cpu", report=lambda line: None)
    update, at_the_sync = walk()
    for leg, run in ((update, lambda: requantize(learner)), (at_the_sync, lambda: sync(learner, engine, spec, 0))):
        rest = iter(called(run, leg))
        assert [step for step in leg if step not in rest] == []  # each is found behind the one before it


def called(run: Callable[[], None], leg: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The calls that `run` makes to functions of `leg`, in their order."""
    found: list[tuple[str, str]] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename.replace("\\", "/")
        for name, path in leg:
            if event == "call" and file.endswith(path) and frame.f_code.co_qualname == name:
                found.append((name, path))

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found
