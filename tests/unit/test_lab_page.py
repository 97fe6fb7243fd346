"""The report's page: tables, escaping, and that it needs nothing beside it."""

import json
import re

import pytest

from quads.errors import UserError
from quads.lab import style
from quads.lab.report import build as report
from quads.lab.report import page
from quads.lab.report.page import Section, markdown_to_html
from quads.lab.report.text import TEXTS
from quads.lab.results import provenance


def test_markdown_becomes_paragraphs_and_tables():
    html = markdown_to_html("|gap| in `nats`, a < b:\n\n| name | value |\n| ---- | ----: |\n| x    |   1.5 |\n\nend")
    assert html.startswith("<p>|gap| in <code>nats</code>, a &lt; b:</p>")
    assert "<tr><th>name</th><th>value</th></tr><tr><td>x</td><td>1.5</td></tr>" in html
    assert html.endswith("<p>end</p>")


def draw():
    figure, (ax,) = style.new_figure(width=2, height=1)
    ax.plot([0, 1], [0, 1])
    return figure


def test_the_page_is_self_contained_and_draws_both_themes(tmp_path):
    about = {
        "command": "python -m quads.lab gap",
        "commit": "abc",
        "versions": {"torch": "2"},
        "seeds": [0, 1],
        "config": "[quant]",
    }
    section = Section("gap", "Title <1>", "shows", "reads **well**", draw, "| a |\n| - |\n| 1 |", about, {"prompts": 3})
    text = page.write(tmp_path / "new" / "r.html", "Heading\n\nFirst.\n\nSecond.", [section]).read_text()
    assert re.findall(r'(?:src|srcset|href)="(?!data:|#)', text) == [] and "http" not in text
    light, dark = re.search(r'src="(data:[^"]+)"', text), re.search(r'srcset="(data:[^"]+)"', text)
    assert light and dark and light[1] != dark[1]
    assert "Title &lt;1&gt;" in text and "reads <strong>well</strong>" in text and "torch 2" in text and "0, 1" in text
    assert text.count("<p>First.</p>") == 1 and "prefers-color-scheme: dark" in text


def test_results_are_reused_only_for_the_same_command_and_config(tmp_path):
    words = report.analysis_argv(
        "gap", "c.toml", tmp_path, "", ["--prompts", "2", "--samples", "1"], ["--train.seed", "3"]
    )
    path = tmp_path / "gap.json"
    assert not report.is_fresh(path, "text", words)
    about = {"command": provenance("gap", words)["command"], "config": "text"}
    path.write_text(json.dumps({"about": about}))
    assert report.is_fresh(path, "text", words)
    assert not report.is_fresh(path, "other text", words)
    assert str(tmp_path) not in about["command"]  # a result does not depend on where it was written
    assert not report.is_fresh(path, "text", [*words[:-1], "4"])


def test_every_analysis_has_words_and_an_empty_folder_is_an_error(tmp_path):
    assert set(TEXTS) == {*report.TRAININGS, *report.ANALYSES}
    with pytest.raises(UserError, match="holds no results"):
        report.main(["--only-page", "--out", str(tmp_path)])


def test_a_collapse_is_said():
    def arm(best: float, last: float) -> dict:
        return {
            key: {"mean": value} for key, value in (("pass_at_1_best", best), ("pass_at_1", last), ("gap_mean", 0.1))
        }

    text = TEXTS["recipes"].reading({"summary": {"naive": arm(0.4, 0.19), "quads": arm(0.4, 0.3)}})
    assert "The score of naive collapses: from 0.400 at its best to 0.190" in text and "quads collapses" not in text
    paired = {
        "naive - quads": [{"mean": -0.2}, {"mean": -0.1}],
        "quads - qat": [{"mean": 0.05}],
        "naive - qat": [{"mean": 1}],
    }
    text = TEXTS["arms"].reading({"summary": {"quads": arm(0.4, 0.3)}, "paired": paired})
    assert "less that of quads, same prompts and seeds, mean over steps: qat -0.050, naive -0.150." in text
