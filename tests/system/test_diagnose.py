"""`svs diagnose` and the last lines of `svs sample`: what a user is told, and what a bad file gets."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray

import structured_voronoi as sv
from structured_voronoi.diagnostics.diagnosis import diagnose_record
from structured_voronoi.diagnostics.records import Record
from structured_voronoi.engine.texts import Text
from system.commands import svs


@pytest.fixture(scope="module")
def draws(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that mixes."""
    path = tmp_path_factory.mktemp("draws") / "draws.nc"
    target = sv.verify.random_target(3, tokens=5, length=2, dimensions=3)
    found = sv.sample(target, sv.SVS(scale=1.0), draws=150, warmup=20, seed=1, progress=False)
    found.to_netcdf(path, engine="h5netcdf")
    return path


def lines(*energies: float, **more: Any) -> list[dict[str, Any]]:
    """As `svs sample` writes them, a chain each."""
    return [
        Text(chain, 0, "Near", f" text {energy}", [1, 2], "end", -energy, energy, {"food=[red]": 0.5}).line() | more
        for chain, energy in enumerate(energies)
    ]


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_run_that_mixes_exits_0_with_a_table_and_pictures(draws: Path, tmp_path: Path) -> None:
    done = svs("diagnose", str(draws), "--out", str(tmp_path / "found"))
    assert "R-hat" in done.stdout
    assert "SVS, 4 chains of 150 draws: nothing speaks against it." in done.stdout
    assert "warning" not in done.stdout
    files = {path.name for path in (tmp_path / "found").iterdir()}
    pictures = {f"diagnosis_{name}.png" for name in ("energy", "ranks", "swaps")}
    assert files == {"diagnosis.json", "diagnosis.md", *pictures}
    found = json.loads((tmp_path / "found" / "diagnosis.json").read_text())
    assert found["trusted"] is True
    assert found["mixing"]["energy"]["rhat"] < 1.1
    assert all(path.stat().st_size > 5000 for path in (tmp_path / "found").glob("*.png"))


def test_a_run_that_should_not_be_trusted_exits_1(tmp_path: Path) -> None:
    target = sv.verify.random_target(3, tokens=5, length=2, dimensions=3)
    found = sv.sample(target, sv.SVS(scale=0.001), draws=30, warmup=0, seed=1, progress=False)
    found.to_netcdf(tmp_path / "stuck.nc", engine="h5netcdf")
    done = svs("diagnose", str(tmp_path / "stuck.nc"), "--out", str(tmp_path), code=1)
    assert "not to be trusted" in done.stdout
    assert "warning: all 4 chains never moved in 30 steps (nothing was proposed): try scale=0.002" in done.stdout
    assert json.loads((tmp_path / "diagnosis.json").read_text())["warnings"][0]["serious"] is True


def test_texts_are_looked_at_for_what_they_can_say(tmp_path: Path) -> None:
    done = svs("diagnose", written(tmp_path / "texts.jsonl", lines(20.0, 21.5, 30.0)), "--out", str(tmp_path / "out"))
    assert "one draw a chain, which cannot say whether the chains mixed" in done.stdout
    assert "food=[red]" in done.stdout, "no markup"
    assert (tmp_path / "out" / "diagnosis_energy.png").exists()
    rows = lines(30.0, *[38.0] * 6, 31.0)
    copied = svs("diagnose", written(tmp_path / "copies.jsonl", rows), code=1)
    assert "a text occurs 6 times although another, that occurs 1 times, is e^8 times as probable" in copied.stdout
    assert "take more particles" in copied.stdout
    svs("diagnose", written(tmp_path / "even.jsonl", lines(30.0, *[30.5] * 4, 31.0)))
    odd = [*lines(30.0), *(row | {"chain": 1, "food=[red]": [1], "energy": 10**400} for row in lines(1.0))]
    assert "no finite energy" in svs("diagnose", written(tmp_path / "odd.jsonl", odd), code=1).stdout
    prompts = [row | {"prompt": str(i)} for i, row in enumerate(rows)]
    svs("diagnose", written(tmp_path / "prompts.jsonl", prompts))


def test_several_draws_a_chain_are_compared(tmp_path: Path) -> None:
    energy = np.random.default_rng(0).normal(30, 2, size=(3, 40))
    rows = [row | {"chain": c, "draw": d} for c in range(3) for d, row in enumerate(lines(*energy[c]))]
    done = svs("diagnose", written(tmp_path / "many.jsonl", [*rows, *lines(33.0, draw=40)]))
    assert "svs sample, 3 chains of 40 draws" in done.stdout
    energy[1] += 9
    rows = [row | {"chain": c, "draw": d} for c in range(3) for d, row in enumerate(lines(*energy[c]))]
    done = svs("diagnose", written(tmp_path / "apart.jsonl", rows), code=1)
    assert "the chains disagree about the energy" in done.stdout
    rows[0]["prompt"] = "In"
    assert "a file for every prompt" in svs("diagnose", written(tmp_path / "mixed.jsonl", rows), code=2).stderr


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "is empty"),
        (b"\n\n", "line 1 is no JSON"),
        (b"a,b\n1,2\n", "line 1 is no JSON"),
        (b"[" * 100_000, "line 1 is no JSON"),
        (b"[1, 2]\n", "has no `chain`"),
        (b'{"chain": true, "draw": 0}\n', "has no `chain`"),
        (json.dumps(lines(1.0)[0]).encode() + b'\n{"chain": 1, "dr', "line 2 is no JSON"),
        (json.dumps(lines(1.0)[0] | {"energy": None}).encode(), "has no `energy`"),
        (json.dumps(lines(1.0)[0]).encode() + b"\n" + json.dumps(lines(1.0)[0]).encode(), "chain 0 has draw 0 twice"),
        (b'{"chain": ' + b"9" * 5000 + b"}", "has no `chain`"),
        (b"\xff\xfe\x00", "neither UTF-8 nor NetCDF"),
        (b"\x89HDF\r\n\x1a\n" + bytes(200), "is damaged"),
    ],
)
def test_a_file_of_nothing_of_ours_is_one_line(content: bytes, cause: str, tmp_path: Path) -> None:
    path = tmp_path / "bad"
    path.write_bytes(content)
    done = svs("diagnose", str(path), "--out", str(tmp_path / "out"), code=2)
    assert cause in done.stderr
    assert str(path) in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_damaged_and_foreign_draws_are_one_line(draws: Path, tmp_path: Path) -> None:
    whole = draws.read_bytes()
    (tmp_path / "cut.nc").write_bytes(whole[: len(whole) // 2])
    xarray.Dataset({"energy": ("x", [1.0])}).to_netcdf(tmp_path / "foreign.nc", engine="h5netcdf")
    with xarray.open_datatree(draws, engine="h5netcdf") as tree:
        tree = tree.load()
    tree.attrs["sampler_settings"] = "{"
    tree.to_netcdf(tmp_path / "settings.nc", engine="h5netcdf")
    for name, cause in (
        ("cut", "is damaged"),
        ("foreign", "holds no sample_stats"),
        ("settings", "not of `sv.sample`"),
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


def test_a_checkpoint_folder_says_what_its_draws_say(tmp_path: Path) -> None:
    target, folder = sv.verify.sentences(controlled=True), tmp_path / "run"
    settings: dict[str, Any] = {"draws": 30, "warmup": 5, "thin": 2, "seed": 1, "progress": False}
    sampler = sv.Cycle(sv.SVS(0.8), sv.Refresh(block=2))
    kept = sv.sample(target, sampler, **settings, checkpoint=folder, keep_warmup=True)
    plain = sv.sample(target, sampler, **settings)
    assert kept["posterior"].to_dataset().identical(plain["posterior"].to_dataset())
    assert kept["warmup_posterior"]["tokens"].shape == (4, 5, 3)
    assert sv.diagnose(folder).to_dict() == sv.diagnose(plain).to_dict()
    with pytest.raises(sv.SamplingError, match="another keep_warmup"):
        sv.sample(target, sampler, **settings, checkpoint=folder)
    part = next(folder.glob("draws-*"))
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    assert part.name in svs("diagnose", str(folder), code=2).stderr
    assert "no checkpoint" in svs("diagnose", str(tmp_path), code=2).stderr


def test_texts_in_a_checkpoint_are_judged_by_their_steps(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Near the\nIn the\n")
    told = svs("sample", "-n", "3", "--prompts", str(prompts), *STUCK, "--checkpoint", str(tmp_path / "run"))
    assert "prompt 1 of 2: warning: all 3 chains never moved" in told.stderr
    done = svs("diagnose", str(tmp_path / "run"), "--out", str(tmp_path / "out"), code=1)
    assert "2 runs: not to be trusted" in done.stdout
    assert "warning: prompt 2: all 3 chains never moved in 21 steps" in done.stdout
    assert (tmp_path / "out" / "diagnosis_prompt_2_energy.png").exists()


def test_texts_of_the_engine_in_a_checkpoint_are_independent(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"n": 3, "length": 6, "ends": "never", "progress": False}
    sv.generate("bundled", "Near the", ["keyword=river"], **settings, checkpoint=tmp_path / "run")
    done = svs("diagnose", str(tmp_path / "run"), "--out", str(tmp_path / "out"))
    assert "the engine" in done.stdout
    assert "warning" not in done.stdout


def test_weights_are_not_alarming_where_none_is_large() -> None:
    """The case of a false alarm: 69 weights, the largest 4 % of all."""
    weight = np.random.default_rng(3).lognormal(0, 0.9, size=(1, 3, 1, 23))
    record = Record("Guided", np.zeros((1, 3)), counts={"log_weights": np.log(weight)}, steps=3)
    assert not [told for told in diagnose_record(record).warnings if "weights" in told]


STUCK = ("--ends", "never", "--length", "5", "--scale", "0.001", "--sampler", "svs", "--warmup", "20")


def test_a_command_ends_with_its_warnings_and_so_does_generate() -> None:
    told = svs("sample", "-n", "3", *STUCK).stderr.splitlines()
    assert told[-1].startswith("svs: warning: all 3 chains never moved in 21 steps (nothing was proposed)")
    assert "try --scale 0.002, --sampler svs+refresh or --sampler adaptive" in told[-1]
    settings: dict[str, Any] = {"ends": "never", "length": 5, "sampler": "svs", "warmup": 20, "progress": False}
    found = sv.generate("bundled", n=3, scale=0.001, **settings)
    assert "warning: all 3 chains never moved" in found.diagnosis
    assert repr(found).count("\n") == 3
    shown = found._repr_html_()
    assert "never moved" in shown
    assert "<th>energy</th>" in shown
    mixed = sv.generate("bundled", n=2, length=5, ends="never", sampler="refresh", warmup=20, progress=False)
    assert "R-hat" in mixed.diagnosis
    assert "warning" not in mixed.diagnosis


def test_many_texts_are_shown_in_part() -> None:
    texts = [Text(i, 0, "<p>", f" text\n{i}", [1], "end", -1.0, 1.0, {"food": 0.25}) for i in range(12)]
    from structured_voronoi.engine.generation import Generated

    found = Generated(texts, "12 texts, fine.")
    assert repr(found).splitlines() == [
        "12 texts, fine.",
        *(f"<p> text {i}" for i in range(8)),
        "… and 4 more in .texts",
    ]
    shown = found._repr_html_()
    assert "&lt;p&gt;" in shown
    assert shown.count("<tr>") == 9
    assert "<td>0.25</td>" in shown
