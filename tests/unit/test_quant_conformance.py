"""The conformance command: golden vectors, corrupted vectors, files and backends that cannot be had."""

import copy
import json
from pathlib import Path

import pytest
import torch

from quads.quant import backend, conformance

GOLDEN = Path(__file__).parents[1] / "golden"
NVFP4 = GOLDEN / "nvfp4_vectors.json"
RESIDUAL = GOLDEN / "residual_vectors.json"


@pytest.mark.parametrize(("path", "count"), [(NVFP4, 86), (RESIDUAL, 9)])
def test_golden_vectors(path, count, capsys):
    assert conformance.main([str(path)]) == 0
    assert capsys.readouterr().out == f"reference: {count} cases, 0 mismatches\n"


@pytest.mark.parametrize("field", ["global_scale_bits", "block_scale", "packed", "dequant_bits"])
def test_corrupted_nvfp4_vector_is_named(field, tmp_path, capsys):
    cases = json.loads(NVFP4.read_text())[:3]
    if field == "global_scale_bits":
        cases[1][field] ^= 1
    else:
        cases[1][field][0] ^= 1
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(cases))
    assert conformance.main([str(path)]) == 1
    out = capsys.readouterr().out
    assert "3 cases, 1 mismatches" in out
    assert f"ties, amax 6 [amax]: {field}: 1 of" in out


@pytest.mark.parametrize("field", ["mask", "main_bits", "residual_bits"])
def test_corrupted_residual_vector_is_named(field, tmp_path, capsys):
    cases = json.loads(RESIDUAL.read_text())
    cases[4][field][7] ^= 1
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(cases))
    assert conformance.main([str(path)]) == 1
    out = capsys.readouterr().out
    assert "9 cases, 1 mismatches" in out and f"case 4 [token 1.0]: {field}: 1 of 112 differ, first at 7" in out


def test_nan_equals_nan_only_in_values():
    nan, other_nan = 0x7FC00000, 0xFFC00001
    case = {"dequant_bits": [nan, 5], "packed": [3]}
    got = {"dequant_bits": torch.tensor([other_nan, 5]), "packed": torch.tensor([3])}
    assert conformance.mismatches(case, got) == []
    got["dequant_bits"] = torch.tensor([0, 5])
    assert len(conformance.mismatches(case, got)) == 1
    negative_zero = {"dequant_bits": torch.tensor([nan, 5 | 1 << 31])}
    assert len(conformance.mismatches(case, negative_zero)) == 1


BROKEN = {
    "not a list": lambda cases: {"cases": cases},
    "empty": lambda cases: [],
    "no object": lambda cases: [3],
    "missing field": lambda cases: [{k: v for k, v in cases[0].items() if k != "packed"}],
    "short field": lambda cases: [cases[0] | {"block_scale": []}],
    "floats": lambda cases: [cases[0] | {"x_bits": [0.5] * 16}],
    "too large": lambda cases: [cases[0] | {"x_bits": [2**32] * 16}],
    "mode": lambda cases: [cases[0] | {"mode": "max"}],
    "no elements": lambda cases: [cases[0] | {"x_bits": []}],
}


@pytest.mark.parametrize("name", BROKEN)
def test_malformed_file_exits_2(name, tmp_path, capsys):
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(BROKEN[name](copy.deepcopy(json.loads(NVFP4.read_text())))))
    with pytest.raises(SystemExit) as exit_info:
        conformance.main([str(path)])
    assert exit_info.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "broken.json" in err


@pytest.mark.parametrize("change", [{"shape": [7, 31]}, {"ratio": 1.5}, {"selection": "row"}, {"mask": [1]}])
def test_malformed_residual_case_exits_2(change, tmp_path, capsys):
    path = tmp_path / "broken.json"
    path.write_text(json.dumps([json.loads(RESIDUAL.read_text())[0] | change]))
    with pytest.raises(SystemExit) as exit_info:
        conformance.main([str(path)])
    assert exit_info.value.code == 2 and next(iter(change)) in capsys.readouterr().err


def test_missing_file_and_no_json_exit_2(tmp_path, capsys):
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    for path in (tmp_path / "nowhere.json", text, tmp_path):
        with pytest.raises(SystemExit) as exit_info:
            conformance.main([str(path)])
        assert exit_info.value.code == 2
        assert str(path) in capsys.readouterr().err


def test_backend_that_cannot_run_is_an_error_and_all_says_so(monkeypatch, capsys):
    monkeypatch.setattr(backend, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_info:
        conformance.main([str(RESIDUAL), "--backend", "triton"])
    assert exit_info.value.code == 2 and "reference backend" in capsys.readouterr().err
    assert conformance.main([str(RESIDUAL), "--backend", "all"]) == 0
    out = capsys.readouterr().out
    assert "triton: did not run: " in out and "reference: 9 cases, 0 mismatches" in out


def test_a_format_that_is_not_known_is_named_and_is_no_success(tmp_path, capsys):
    known = json.loads((GOLDEN / "nvfp4_vectors.json").read_text())[:2]
    (tmp_path / "mixed.json").write_text(json.dumps([*known, {"format": "nf4", "anything": 1}]))
    assert conformance.main([str(tmp_path / "mixed.json")]) == 1
    out = capsys.readouterr().out
    assert "1 cases of the format 'nf4', which is not known; known: fp8, nvfp4, mxfp4" in out
    assert "reference: 2 cases, 0 mismatches" in out
    (tmp_path / "other.json").write_text(json.dumps([{"format": "nf4"}]))
    with pytest.raises(SystemExit) as exit:
        conformance.main([str(tmp_path / "other.json")])
    assert exit.value.code == 2 and "no case of a known format" in capsys.readouterr().err
