"""`svs diagnose`, and the diagnostics of texts: figures, warnings and errors as users see them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import xarray

import structured_voronoi as sv
from structured_voronoi.diagnostics.diagnosis import Diagnosis
from structured_voronoi.engine.texts import Text
from system.commands import svs

STUCK_CHAINS = ("--finish", "length", "--max-tokens", "5", "--scale", "0.001", "--sampler", "svs", "--warmup", "20")


@pytest.fixture(scope="module")
def draws(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a run that mixes."""
    path = tmp_path_factory.mktemp("draws") / "draws.nc"
    target = sv.verify.random_target(3, tokens=5, length=2, dimensions=3)
    found = sv.sample(target, sv.SVS(scale=1.0), draws=150, warmup=20, seed=1, progress=False)
    found.to_netcdf(path, engine="h5netcdf")
    return path


def lines(*log_probs: float, **more: Any) -> list[dict[str, Any]]:
    """Lines as `svs sample --out` writes them, one for each log p."""
    return [
        Text("Near", index, f" text {log_p}", [1, 2], "stop", log_p, log_p, {"food=[red]": 0.5}).line() | more
        for index, log_p in enumerate(log_probs)
    ]


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_run_that_mixes_exits_0_with_a_table_and_plots(draws: Path, tmp_path: Path) -> None:
    done = svs("diagnose", str(draws), "--out", str(tmp_path / "found"))
    assert "R-hat" in done.stdout
    assert "SVS, 4 chains of 150 draws" in done.stdout
    assert "no warnings" in done.stdout
    files = {path.name for path in (tmp_path / "found").iterdir()}
    plots = {f"diagnosis_{name}.png" for name in ("log_p", "ranks", "swaps")}
    assert files == {"diagnosis.json", "diagnosis.md", *plots}
    found = json.loads((tmp_path / "found" / "diagnosis.json").read_text())
    assert found["ok"] is True
    assert found["mixing"]["lp"]["rhat"] < 1.1
    assert all(path.stat().st_size > 5000 for path in (tmp_path / "found").glob("*.png"))


def test_a_serious_warning_exits_1(tmp_path: Path) -> None:
    target = sv.verify.random_target(3, tokens=5, length=2, dimensions=3)
    found = sv.sample(target, sv.SVS(scale=0.001), draws=30, warmup=0, seed=1, progress=False)
    found.to_netcdf(tmp_path / "stuck.nc", engine="h5netcdf")
    done = svs("diagnose", str(tmp_path / "stuck.nc"), "--out", str(tmp_path), code=1)
    assert "warning (stuck-chains): all 4 chains did not move in 30 steps" in done.stdout
    (warning,) = json.loads((tmp_path / "diagnosis.json").read_text())["warnings"]
    assert warning["code"] == "stuck-chains"
    assert warning["serious"] is True


def test_files_of_texts_are_checked_for_copies(tmp_path: Path) -> None:
    path = written(tmp_path / "texts.jsonl", lines(-20.0, -21.5, -30.0))
    done = svs("diagnose", path, "--out", str(tmp_path / "out"))
    assert "3 texts" in done.stdout
    assert "food=[red]" in done.stdout, "brackets are not markup"
    assert (tmp_path / "out" / "diagnosis_log_p.png").exists()
    found = sv.diagnose(path)
    assert found.note
    assert set(found.mixing) == {"lp", "food=[red]"}
    assert found.figures == {"prompts": 1, "repeated texts": 0, "share of texts that stopped": 1.0}

    rows = lines(-30.0, *[-38.0] * 6, -31.0)
    copied = sv.diagnose(written(tmp_path / "copies.jsonl", rows))
    assert [warning.code for warning in copied.warnings] == ["copies"]
    assert not copied.ok
    assert sv.diagnose(written(tmp_path / "even.jsonl", lines(-30.0, *[-30.5] * 4, -31.0))).ok
    prompts = [row | {"prompt": str(i)} for i, row in enumerate(rows)]
    assert sv.diagnose(written(tmp_path / "prompts.jsonl", prompts)).ok, "texts of other prompts are no copies"


def test_texts_with_infinite_log_p_are_impossible_draws(tmp_path: Path) -> None:
    infinite = [*lines(-30.0), *(row | {"food=[red]": [1], "log_target": -(10**400)} for row in lines(-1.0))]
    found = sv.diagnose(written(tmp_path / "infinite.jsonl", infinite))
    assert [warning.code for warning in found.warnings] == ["impossible-draws"]
    assert set(found.mixing) == {"lp"}, "a list is no score"


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "is empty"),
        (b"\n\n", "line 1 is not JSON"),
        (b"a,b\n1,2\n", "line 1 is not JSON"),
        (b"[" * 100_000, "line 1 is not JSON"),
        (b"[1, 2]\n", "no valid `prompt`"),
        (json.dumps(lines(-1.0)[0] | {"index": True}).encode(), "no valid `index`"),
        (json.dumps(lines(-1.0)[0]).encode() + b'\n{"index": 1, "te', "line 2 is not JSON"),
        (json.dumps(lines(-1.0)[0] | {"log_target": None}).encode(), "no valid `log_target`"),
        (b'{"prompt": "", "index": ' + b"9" * 5000 + b"}", "no valid `index`"),
        (b"\xff\xfe\x00", "neither JSONL nor NetCDF"),
        (b"\x89HDF\r\n\x1a\n" + bytes(200), "is damaged"),
    ],
)
def test_invalid_files_are_errors_of_one_line(content: bytes, cause: str, tmp_path: Path) -> None:
    path = tmp_path / "invalid"
    path.write_bytes(content)
    done = svs("diagnose", str(path), "--out", str(tmp_path / "out"), code=2)
    assert cause in done.stderr
    assert str(path) in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_damaged_and_foreign_draws_are_errors_of_one_line(draws: Path, tmp_path: Path) -> None:
    whole = draws.read_bytes()
    (tmp_path / "cut.nc").write_bytes(whole[: len(whole) // 2])
    xarray.Dataset({"lp": ("x", [1.0])}).to_netcdf(tmp_path / "foreign.nc", engine="h5netcdf")
    with xarray.open_datatree(draws, engine="h5netcdf") as tree:
        tree = tree.load()
    tree.attrs["sampler_settings"] = "{"
    tree.to_netcdf(tmp_path / "settings.nc", engine="h5netcdf")
    for name, cause in (
        ("cut", "is damaged"),
        ("foreign", "has no sample_stats"),
        ("settings", "not written by sv.sample"),
    ):
        done = svs("diagnose", str(tmp_path / f"{name}.nc"), code=2)
        assert cause in done.stderr
        assert done.stderr.count("\n") == 1
    os.mkfifo(tmp_path / "pipe")
    for path, cause in (("absent", "does not exist"), ("pipe", "is not a file")):
        assert cause in svs("diagnose", str(tmp_path / path), code=2).stderr
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    assert "cannot be written" in svs("diagnose", str(draws), "--out", str(blocked), code=2).stderr


def test_a_checkpoint_has_the_diagnosis_of_its_draws(tmp_path: Path) -> None:
    target, folder = sv.verify.sentences(controlled=True), tmp_path / "run"
    settings: dict[str, Any] = {"draws": 30, "warmup": 5, "thin": 2, "seed": 1, "progress": False}
    sampler = sv.Cycle(sv.SVS(0.8), sv.Refresh(block=2))
    saved = sv.sample(target, sampler, **settings, checkpoint=folder, keep_warmup=True)
    plain = sv.sample(target, sampler, **settings)
    assert saved["posterior"].to_dataset().identical(plain["posterior"].to_dataset())
    assert saved["warmup_posterior"]["tokens"].shape == (4, 5, 3)
    assert sv.diagnose(folder).to_dict() == sv.diagnose(plain).to_dict()
    with pytest.raises(sv.SamplingError, match="keep_warmup"):
        sv.sample(target, sampler, **settings, checkpoint=folder)
    part = next(folder.glob("draws-*"))
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    assert part.name in svs("diagnose", str(folder), code=2).stderr
    assert "has no manifest.json" in svs("diagnose", str(tmp_path), code=2).stderr


def test_the_chains_of_texts_in_a_checkpoint_are_diagnosed_by_prompt(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Near the\nIn the\n")
    arguments = ("-n", "3", "--prompts", str(prompts), *STUCK_CHAINS, "--checkpoint", str(tmp_path / "run"))
    done = svs("sample", *arguments)
    assert "warning: prompt 1 of 2: all 3 chains did not move" in done.stderr
    found = sv.diagnose(tmp_path / "run")
    assert found.run == "2 runs"
    assert {"prompt 1: lp", "prompt 2: lp"} <= set(found.mixing)
    assert [warning.code for warning in found.warnings] == ["stuck-chains"] * 2
    assert found.warnings[1].message.startswith("prompt 2: all 3 chains did not move in 21 steps")
    svs("diagnose", str(tmp_path / "run"), "--out", str(tmp_path / "out"), code=1)
    assert (tmp_path / "out" / "diagnosis_prompt_2_log_p.png").exists()


def test_accepted_texts_in_a_checkpoint_are_independent(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"n": 3, "max_tokens": 6, "finish": "length", "progress": False}
    sv.generate("bundled", "Near the", [sv.keyword("river")], **settings, checkpoint=tmp_path / "run")
    found = sv.diagnose(tmp_path / "run")
    assert found.note == "independent draws"
    assert found.warnings == []


def test_warnings_of_generate_and_of_the_command() -> None:
    last = svs("sample", "-n", "3", *STUCK_CHAINS).stderr.splitlines()[-1]
    assert last.startswith("svs: warning: all 3 chains did not move in 21 steps")
    assert "--scale 0.002" in last
    assert "--sampler svs+refresh" in last
    settings: dict[str, Any] = {"finish": "length", "max_tokens": 5, "warmup": 20, "progress": False}
    stuck = sv.generate("bundled", n=3, sampler="svs", scale=0.001, **settings)
    assert not stuck.diagnostics.ok
    (warning,) = stuck.diagnostics.warnings
    assert warning.code == "stuck-chains"
    assert "scale=0.002" in warning.remedy
    assert warning.message in repr(stuck)
    assert warning.message in stuck._repr_html_()
    assert sv.generate("bundled", n=2, sampler="refresh", **settings).diagnostics.warnings == []


def test_many_texts_are_shown_in_part() -> None:
    from structured_voronoi.engine.result import Generation

    texts = [Text("<p>", i, f" text\n{i}", [1], "stop", -1.0, -1.0, {"food": 0.25}) for i in range(12)]
    found = Generation(texts, Diagnosis("12 texts"))
    assert repr(found).splitlines()[1:] == [*(f"<p> text {i}" for i in range(8)), "… and 4 more in .texts"]
    shown = found._repr_html_()
    assert "&lt;p&gt;" in shown
    assert shown.count("<tr>") == 9
    assert "<td>0.25</td>" in shown
