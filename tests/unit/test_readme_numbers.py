"""The tables of the README and of docs/evidence say what the published JSON says, digit by digit."""

import json
import re
from typing import Any

import pytest

from tests.helpers import REPOSITORY

TABLES = {  # JSON -> the words of the README above its table
    "docs/evidence/tiny/recipes.json": "What it shows",
    "docs/evidence/smollm2/recipes.json": "Real weights",
}
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")


EVIDENCE = "docs/evidence/README.md"


def rows_after(text: str, page: str = "README.md") -> dict[str, list[str]]:
    """First column -> all numbers of the other columns, of the first table after `text`."""
    lines = (REPOSITORY / page).read_text(encoding="utf-8").partition(text)[2].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| --- "))
    rows = {}
    for line in lines[first + 1 :]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip(" *`") for cell in line.strip("|").split("|"))
        rows[name] = NUMBER.findall(" ".join(cells))
    return rows


def expected(arm: dict[str, Any]) -> list[float]:
    """In the order of the README's columns."""
    last, score = arm["reward_last"], arm["pass_at_1"]
    spread = [last["mean"], last["low"], last["high"], score["mean"], score["low"], score["high"]]
    return [
        arm["reward_first"]["mean"],
        *spread,
        arm["gap_mean"]["mean"],
        arm["gap_max"]["mean"],
        arm["time_s"]["mean"],
    ]


def agrees(printed: str, value: float) -> bool:
    """`printed` is `value` rounded to the digits that are shown."""
    digits, _, exponent = printed.partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
    return abs(float(printed) - value) <= 0.5001 * unit


@pytest.mark.parametrize("file", TABLES)
def test_table_of_the_readme(file: str):
    summary = json.loads((REPOSITORY / file).read_text(encoding="utf-8"))["summary"]
    rows = rows_after(TABLES[file])
    assert rows.keys() == summary.keys()
    for name, printed in rows.items():
        values = expected(summary[name])
        assert len(printed) == len(values), (name, printed)
        assert all(map(agrees, printed, values)), (name, printed, values)


def published(file: str) -> dict[str, Any]:
    return json.loads((REPOSITORY / "docs" / "evidence" / file).read_text(encoding="utf-8"))


def check(printed: list[str], values: list[float]) -> None:
    assert len(printed) == len(values) and all(map(agrees, printed, values)), (printed, values)


def test_scores_of_the_runs_on_smollm2():
    data = published("smollm2/recipes.json")
    rows = rows_after("## B.", EVIDENCE)
    assert len(rows) == len(data["summary"])
    for name, printed in rows.items():
        arm = re.split(r"\W", name)[0]
        summary, curves = data["summary"][arm], data["curves"][arm]["curves"]
        truncated = 100 * summary["truncated_last"]["mean"]
        check(printed, [*curves["eval/pass@1"]["mean"], summary["gap_mean"]["mean"], truncated])


def test_residual_sites_at_equal_cost():
    sets = [
        {tuple(entry["sites"]): {row["selection"]: row["mean"] for row in entry["rows"]} for entry in of_cost["sets"]}
        for of_cost in (published("smollm2/ratio_cost_5.json"), published("smollm2/ratio_cost.json"))
    ]
    every = ("w13", "w2", "qkv", "o")
    for name, printed in rows_after("## C.", EVIDENCE).items():
        name = name.replace(" (the paper's)", "").replace("q, k, v", "qkv")
        sites = every if name == "all four" else tuple(name.split(", "))
        check(printed, [means[sites][s] for means in sets if sites in means for s in ("batch", "token")])


def test_selections_by_ratio():
    for name, printed in rows_after("## E.", EVIDENCE).items():
        model, selection = re.split(r"\W+", name)[:2]
        entry = next(e for e in published(f"{model.lower()}/ratio.json")["sets"] if len(e["sites"]) == 4)
        selection = selection.removesuffix("s")  # "blocks of 16"
        check(printed, [row["mean"] for row in entry["rows"] if row["selection"] in ("none", selection)])


def test_gaps_of_the_sides():
    sides = {model: published(f"{model}/gap.json")["sides"] for model in ("tiny", "smollm2")}
    rows = rows_after("| mean gap in nats (`gap.json`)", EVIDENCE)
    pairs = [("w4a4", "no QDQ"), ("w4a4", "weight QDQ"), ("w4a4_residual", "weight QDQ"), ("w4a4", "both QDQ")]
    for printed, (rollout, learner) in zip(rows.values(), pairs, strict=True):
        check(printed, [sides[model][rollout][learner]["mean"] for model in ("tiny", "smollm2")])


def of_seeds(model: str, arm: str, quantity: str) -> list[float]:
    return [run[quantity] for run in published(f"{model}/arms.json")["runs"] if run["arm"] == arm]


def difference(model: str, a: str, b: str) -> list[float]:
    """Of paired rewards, a less b: mean and error, seed by seed. Tables print the sign apart from the digits."""
    paired = published(f"{model}/arms.json")["paired"]
    entries, sign = (paired[f"{a} - {b}"], 1) if f"{a} - {b}" in paired else (paired[f"{b} - {a}"], -1)
    return [value for entry in entries for value in (sign * entry["mean"], entry["error"])]


def test_asymmetry_with_and_without_residual():
    rows = rows_after("## D.", EVIDENCE)
    for residual, (one, both) in {"off": ("qat", "symmetric"), "on": ("quads", "symmetric_residual")}.items():
        for model in ("SmolLM2", "tiny"):
            summary = published(f"{model.lower()}/arms.json")["summary"]
            sides = [summary[arm][key]["mean"] for arm in (one, both) for key in ("pass_at_1", "gap_mean")]
            apart = difference(model.lower(), one, both)
            check(rows[f"{model}, {residual}"], [*sides, *map(abs, apart)])
            assert all((mean > 0) == (residual == "on") for mean in apart[::2])


def test_variants_through_rl():
    """The tables of C and E: pass@1 with its seeds, gap, and reward less that of quads."""
    arms = {
        "nothing (qat)": "qat",
        "w13, ratio 0.5 (the paper's)": "quads_w13",
        "all four, ratio 0.286": "quads_spread",
        "all four, ratio 0.5 (quads)": "quads",
        "all four, ratio 1": "quads_full",
        "batch, 0.5 (quads)": "quads",
        "token, 0.5 (quads_token)": "quads_token",
        "all channels (quads_full)": "quads_full",
    }
    for section, skipped in (("in C", 1), ("in E", 0)):  # C has a column of costs
        for name, printed in rows_after(f"<!-- {section} -->", EVIDENCE).items():
            model, _, rest = name.partition(": ") if section == "in E" else ("smollm2", "", name)
            model, arm = model.lower(), arms[rest]
            summary = published(f"{model}/arms.json")["summary"][arm]
            values = [summary["pass_at_1"]["mean"], *of_seeds(model, arm, "pass_at_1"), summary["gap_mean"]["mean"]]
            values += [] if skipped else [summary["gap_max"]["mean"]]
            values += [] if arm == "quads" else [abs(value) for value in difference(model, arm, "quads")]
            check(printed[skipped:], values)


def test_policies_under_other_precisions():
    data = published("smollm2/scores.json")
    cells = {(row["arm"], row["rollout"]): row["pass@1"] for row in data["rows"]}
    for name, printed in rows_after("## Is the policy bad", EVIDENCE).items():
        arm = name.partition(",")[0]
        columns = ("bf16", "w4a16", "w4a4", "w4a4_residual")
        check(printed, [cells[arm, rollout] for rollout in columns if (arm, rollout) in cells])
    tiny = {(row["arm"], row["rollout"]): row["pass@1"] for row in published("tiny/scores.json")["rows"]}
    for name, printed in rows_after("| tiny, pass@1", EVIDENCE).items():
        columns = [r for r in ("own", "bf16", "w4a16", "w4a4") if (name, r) in tiny]
        check(printed, [tiny[name, rollout] for rollout in columns])
    assert data["steps"] == {"naive": 80, "qat": 76, "symmetric": 68, "quads": 76}


def test_decomposition():
    rows = {(r["kind"], r["site"], r["format"]): r for r in published("smollm2/decompose.json")["rows"]}
    for name, printed in rows_after("## How a 4-bit value errs", EVIDENCE).items():
        kind, site = name.split(", ")
        nvfp4, mxfp4 = rows[kind, site, "nvfp4"], rows[kind, site, "mxfp4"]
        parts = [nvfp4[part] for part in ("total", "scale_bias", "dead_zone", "grid_noise", "dead_fraction")]
        check(printed, [100 * value for value in (*parts, mxfp4["total"], mxfp4["scale_bias"])])


def test_rounding():
    assert agrees("0.344", 0.34375) and not agrees("0.344", 0.3432)
    assert agrees("5.8e-7", 5.84e-7) and not agrees("5.8e-7", 5.9e-7) and agrees("80", 79.6)
