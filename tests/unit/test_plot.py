"""The picture of runs: what is drawn, in which colour, without overlaps, and what cannot be drawn."""

import json
from pathlib import Path

import numpy
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from quads.errors import UserError
from quads.plot import PANELS, RECIPE_COLOURS, Curves, draw, main, plot_runs

ROWS = [
    {"step": s, "reward/mean": 0.1 * s, "mismatch/logprob_abs_max": 1e-3 * s, "mismatch/logprob_abs_mean": 1e-4}
    for s in range(1, 6)
]


def write(folder: Path, rows: list[dict]) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_one_run_gets_a_picture_in_its_folder(tmp_path: Path) -> None:
    run = write(tmp_path / "tiny_quads", ROWS)
    main([str(run)])
    assert (run / "plots" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_seeds_become_one_curve_in_a_band() -> None:
    missing = [{**row, "reward/mean": None} if row["step"] == 2 else row for row in ROWS[:4]]
    curves = Curves([ROWS, [{**row, "reward/mean": row["reward/mean"] + 1} for row in ROWS[:3]], missing])
    steps, values = curves.points("reward/mean")
    assert steps.tolist() == [1, 2, 3, 4, 5]
    numpy.testing.assert_allclose(numpy.nanmean(values, axis=0), [0.1 + 1 / 3, 0.7, 0.3 + 1 / 3, 0.4, 0.5])
    line = draw({"quads": curves}).axes[0].lines[0]
    numpy.testing.assert_allclose(line.get_ydata(), numpy.nanmean(values, axis=0))
    band = draw({"quads": curves}).axes[0].collections[0].get_paths()[0].get_extents()
    assert (round(band.y0, 6), round(band.y1, 6)) == (0.1, 1.3)


def test_folders_of_seeds_share_one_legend_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {}
    monkeypatch.setattr("quads.plot.draw", lambda curves: drawn.update(curves) or draw(curves))
    runs = [write(tmp_path / f"qat_seed{i}", ROWS) for i in (0, 1, 12)] + [write(tmp_path / "seedless", ROWS)]
    plot_runs(runs, tmp_path / "new" / "x.png")
    assert {name: curves.num_seeds for name, curves in drawn.items()} == {"qat": 3, "seedless": 1}
    assert (tmp_path / "new" / "x.png").exists()


def test_a_recipe_has_its_own_colour_and_every_run_another() -> None:
    names = ["tiny_naive", "a", "b", "bf16", "other_naive"]
    figure = draw({name: Curves([ROWS]) for name in names})
    colours = {handle.get_label(): handle.get_color() for handle in figure.legends[0].get_lines()}
    assert colours["tiny_naive"] == RECIPE_COLOURS["naive"] and colours["bf16"] == RECIPE_COLOURS["bf16"]
    assert len(set(colours.values())) == len(names)


def test_gap_is_logarithmic_where_it_spans_a_decade() -> None:
    exact = [{**row, "mismatch/logprob_abs_max": 0.0, "mismatch/logprob_abs_mean": 0.0} for row in ROWS]
    wider = [{**row, "mismatch/logprob_abs_max": 0.9} for row in ROWS]  # the others reach 1e-3 to 5e-3

    def scales(*runs: list[dict]) -> list[str]:
        return [ax.get_yscale() for ax in draw({str(i): Curves([rows]) for i, rows in enumerate(runs)}).axes]

    assert scales(ROWS) == scales(exact) == ["linear", "linear", "linear"]
    assert scales(ROWS, wider, exact) == ["linear", "linear", "log"]


@pytest.mark.parametrize("num_runs", [1, 6, 12])
def test_nothing_overlaps_or_leaves_the_picture(num_runs: int) -> None:
    rows = [{**row, "eval/pass@1": 0.5} for row in ROWS]
    curves = {f"some_long_run_name_{i}": Curves([rows, rows]) for i in range(num_runs)}
    figure = draw(curves)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    boxes = [ax.get_tightbbox(renderer) for ax in figure.axes] + [figure.legends[0].get_window_extent(renderer)]
    assert len(boxes) == len(PANELS) + 1
    for i, box in enumerate(boxes):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
        assert not any(box.overlaps(other) for other in boxes[:i])


def test_what_cannot_be_drawn_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([str(tmp_path / "nowhere")])
    assert exit_info.value.code == 2
    assert "nowhere" in capsys.readouterr().err
    with pytest.raises(UserError, match="no row yet"):
        plot_runs([write(tmp_path / "empty", [])], tmp_path / "x.png")
    with pytest.raises(UserError, match="reward/mean"):
        plot_runs([write(tmp_path / "other", [{"step": 1, "loss": 2.0}])], tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()
