from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import infinity_reference as reference
import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")

from toprovar.runtime.errors import ToprovarError
from toprovar.tools import parity_file, parity_hart, parity_infinitystar, parity_var
from toprovar.tools.parity import app, compare_file
from toprovar.tools.parity_report import KINDS, TOLERANCES, Report, compare_array

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT.parent / "shared" / "fixtures"


def shipped(name: str) -> Path:
    path = FIXTURES / name
    if not path.exists():
        pytest.skip(f"needs the shipped parity file {name} in shared/fixtures beside the repository")
    return path


def recorded(folder: Path, case: str) -> Path:
    return reference.write_fixture(reference.run_case(reference.CASES[case]), folder / f"{case}.npz")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return recorded(tmp_path, "unguided")


def changed(path: Path, drop: tuple[str, ...] = (), meta: Any = None, **arrays: np.ndarray) -> Path:
    """The same file with arrays replaced, added or dropped; `/` in a name is written `__`."""
    with np.load(path) as archive:
        content = {name: archive[name] for name in archive.files if name not in drop}
    content |= {name.replace("__", "/"): array for name, array in arrays.items()}
    if meta is not None:
        content["meta"] = np.array(meta if isinstance(meta, str) else json.dumps(meta))
    np.savez(path, **content)
    return path


def settings_of(path: Path) -> dict[str, Any]:
    with np.load(path) as archive:
        return json.loads(str(archive["meta"]))


def verdicts(report: Report, backend: str = "torch") -> dict[str, str]:
    return {row.array: row.verdict for row in report.rows if row.backend == backend}


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


# -- whole files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["infinity_2b_tiny.npz", "infinity_vae_tiny.npz"])
def test_shipped_files_pass_on_both_backends(name: str) -> None:
    report = compare_file(shipped(name))
    assert report.passed, report.failed
    assert {row.backend for row in report.rows if row.verdict == "pass"} == {"torch", "onnxruntime"}
    assert not [row for row in report.rows if row.verdict == "unknown"]


@pytest.mark.parametrize("case", list(reference.CASES))
def test_plain_reference_passes_on_both_backends(case: str, tmp_path: Path) -> None:
    report = compare_file(recorded(tmp_path, case))
    assert report.passed, report.failed
    assert not [row for row in report.rows if row.verdict == "unknown"]
    missing = {row.array for row in report.rows if row.verdict == "not seen"}
    assert missing == {"ca_kv"}  # the prompt graph keeps it inside
    expected = {"cond_BD", "gss", "rope", "summed_codes", "cache_k0", "cache_v0", "block0/0", "raw/0", "in/1"}
    assert expected < {row.array for row in report.rows if row.verdict == "pass" and row.backend == "onnxruntime"}


def test_tokenizer_with_encoder_passes(tmp_path: Path) -> None:
    report = compare_file(reference.write_tokenizer_fixture(tmp_path / "tokenizer.npz"))
    assert report.passed, report.failed
    assert set(verdicts(report).values()) == {"pass"}
    assert verdicts(report, "onnxruntime")["dec/x"] == "pass"


def test_command_and_function_agree(small: Path) -> None:
    result = command(str(small), "--json", "--backend", "torch", "--run", "b")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == compare_file(small, ["b"], ["torch"]).document()


def test_table_names_every_array(small: Path) -> None:
    result = command(str(small), "--backend", "torch")
    assert result.exit_code == 0, result.output
    for row in compare_file(small, None, ["torch"]).rows:
        assert row.array in result.stdout
    assert "comparisons pass" in result.stdout.splitlines()[-1]


# -- the format's freedoms ---------------------------------------------------------------------------------------------


def test_text_may_be_an_alias_and_settings_single_numbers(small: Path) -> None:
    meta = settings_of(small)
    meta["sched"] = [entry[1:] for entry in meta["sched"]]
    meta["b"] |= {"text": "words", "cfg": 1, "tau": 0.5, "insertion": 0}
    with np.load(small) as archive:
        text = archive["b/text"]
    report = compare_file(changed(small, ("b/text",), meta, words=text), None, ["torch"])
    assert report.compared
    assert not report.failed


def test_run_without_arrays_is_passed_over(small: Path) -> None:
    meta = settings_of(small)
    meta["c"] = meta["b"]
    assert compare_file(changed(small, meta=meta), None, ["torch"]).passed


def test_cut_recordings_are_compared_as_far_as_they_go(small: Path) -> None:
    with np.load(small) as archive:
        block = archive["b/block1/2"]
    report = compare_file(changed(small, b__block1__2=block[:1, :2]), None, ["torch"])
    assert report.passed
    row = next(row for row in report.rows if row.array == "block1/2")
    assert row.values == block[:1, :2].size
    assert row.note == "leading part of [2, 16, 32]"


def test_maps_counted_by_the_scale_that_leaves_them_are_understood(small: Path) -> None:
    with np.load(small) as archive:
        first, second = archive["b/next/1"], archive["b/next/2"]
    report = compare_file(changed(small, ("b/next/2",), b__next__0=first, b__next__1=second), None, ["torch"])
    assert report.passed, report.failed


def test_unknown_array_is_named_and_left_out(small: Path) -> None:
    report = compare_file(changed(small, b__magic__0=np.zeros(3, np.float32)), None, ["torch"])
    assert report.passed
    assert verdicts(report)["magic/0"] == "unknown"


# -- answers that are no -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "delta"), [("raw/1", 2e-3), ("logits/2", 2e-3), ("block0/0", 1e-3), ("next/1", 2e-5), ("cache_k0", 1e-4)]
)
def test_changed_value_fails(small: Path, name: str, delta: float) -> None:
    with np.load(small) as archive:
        array = archive[f"b/{name}"]
    array.reshape(-1)[-1] += delta
    result = command(str(changed(small, **{f"b__{name.replace('/', '__')}": array})), "--backend", "torch", "--json")
    assert result.exit_code == 1
    failed = [row for row in json.loads(result.stdout)["arrays"] if row["verdict"] == "fail"]
    assert [row["array"] for row in failed] == [name]
    assert failed[0]["max_abs_error"] == pytest.approx(delta, rel=0.1)


def test_contradicted_bit_fails(tmp_path: Path) -> None:
    path = recorded(tmp_path, "chunks")
    with np.load(path) as archive:
        bits, logits = archive["b/bits/3"], archive["b/logits/3"]
    odds = logits[..., 1::2] - logits[..., 0::2]
    surest = np.unravel_index(np.abs(odds).argmax(), odds.shape)
    bits[surest] ^= 1
    report = compare_file(changed(path, b__bits__3=bits), None, ["torch"])
    assert {row.array for row in report.failed} == {"bits/3", "summed_codes"}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_recorded_non_finite_value_fails(small: Path, value: float) -> None:
    with np.load(small) as archive:
        array = archive["b/raw/1"]
    array[0, 0, 0] = value
    result = command(str(changed(small, b__raw__1=array)), "--backend", "torch", "--json")
    assert result.exit_code == 1
    row = next(row for row in json.loads(result.stdout)["arrays"] if row["array"] == "raw/1")
    assert row["verdict"] == "fail"
    assert row["note"] == "1 recorded values not finite"


def test_other_shape_and_empty_array_fail() -> None:
    two = np.zeros((2, 3), np.float32)
    assert compare_array("torch", "a", "logits/0", two, two[:1]).note == "shape [2, 3], expected [1, 3]"
    assert compare_array("torch", "a", "raw/0", two, two[:0]).verdict == "fail"


def test_computed_nan_fails() -> None:
    bad = np.array([1.0, np.nan], np.float32)
    row = compare_array("torch", "a", "logits/0", bad, np.ones(2, np.float32))
    assert (row.verdict, row.note) == ("fail", "1 computed values not finite")


def test_comparing_nothing_fails(small: Path) -> None:
    with np.load(small) as archive:
        compared = tuple(n for n in archive.files if n.startswith("b/") and n.split("/")[1] not in ("text", "bits"))
    result = command(str(changed(small, (*compared, "rope"))), "--backend", "torch")
    assert result.exit_code == 1
    assert "nothing was compared by torch" in result.stdout


def test_every_kind_has_a_tolerance_with_a_reason() -> None:
    assert {kind for _, kind in (*KINDS, *parity_hart.KINDS, *parity_var.KINDS, *parity_infinitystar.KINDS)} == set(
        TOLERANCES
    )
    assert all(tolerance.reason for tolerance in TOLERANCES.values())


# -- input that is refused ---------------------------------------------------------------------------------------------


def refusal(path: Path, *arguments: str) -> str:
    result = command(str(path), "--backend", "torch", *arguments)
    assert result.exit_code == 2, result.output
    assert not result.stdout
    assert "Traceback" not in result.stderr
    message = " ".join(result.stderr.split())
    assert message.startswith("error: ")
    with pytest.raises(ToprovarError) as caught:
        compare_file(path, list(arguments[1:]) or None, ["torch"])
    assert message == f"error: {' '.join(str(caught.value).split())}"
    return message


def test_missing_empty_and_foreign_files_are_told_apart(tmp_path: Path) -> None:
    assert "absent.npz does not exist" in refusal(tmp_path / "absent.npz")
    (tmp_path / "empty.npz").touch()
    assert "empty.npz is empty" in refusal(tmp_path / "empty.npz")
    (tmp_path / "text.npz").write_text("not a zip")
    assert "text.npz is no readable .npz" in refusal(tmp_path / "text.npz")
    assert "is a folder" in refusal(tmp_path)


def test_cut_file_is_refused(small: Path) -> None:
    small.write_bytes(small.read_bytes()[:-1000])
    assert "is no readable .npz" in refusal(small)


def test_changed_bytes_are_refused(small: Path) -> None:
    data = bytearray(small.read_bytes())
    with zipfile.ZipFile(small) as archive:
        entry = archive.getinfo("w/head.weight.npy")
    data[entry.header_offset + 400] ^= 255
    small.write_bytes(data)
    assert "w/head.weight.npy: bad crc-32" in refusal(small)


def test_oversized_file_is_refused_before_reading(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity_file, "MAX_FILE_BYTES", 1000)
    assert "expected at most 1000 for a parity file" in refusal(small)


def test_file_that_expands_too_far_is_refused(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity_file, "MAX_EXPANDED_BYTES", 1000)
    assert "expands to" in refusal(small)


def test_declared_size_is_checked_before_allocating(small: Path) -> None:
    header = np.lib.format.magic(1, 0) + (118).to_bytes(2, "little")
    text = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000, 1000000), }"
    with zipfile.ZipFile(small, "a") as archive:
        archive.writestr("b/huge.npy", header + text.ljust(117) + b"\n" + b"1234")
    assert "array b/huge [1000000, 1000000] needs 4000000000000 bytes, the entry has 4" in refusal(small)


def test_objects_are_never_unpickled(small: Path) -> None:
    with np.load(small) as archive:
        content = dict(archive)
    np.savez(small, **content, **{"b/object": np.array([{}], object)})
    assert "array b/object holds [1] of object" in refusal(small)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_doubled_entry_is_refused(small: Path) -> None:
    with zipfile.ZipFile(small, "a") as archive:
        archive.writestr("b/text.npy", archive.read("b/text.npy"))
    assert "entry b/text.npy stands twice" in refusal(small)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ("{", "meta is not valid JSON"),
        ("[1]", "meta is a JSON list; expected an object"),
        ('{"a": NaN}', "meta is not valid JSON: NaN"),
        ('{"C": 64}', "holds no run"),
    ],
)
def test_unusable_meta_is_refused(small: Path, meta: str, message: str) -> None:
    assert message in refusal(changed(small, meta=meta))


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        ("meta", "has no entry meta"),
        ("b/bits/1", "has no array b/bits/1"),
        ("b/text", "has no array b/text"),
        ("w/head.weight", "tensor head.weight is missing"),
    ],
)
def test_missing_array_is_named(small: Path, drop: str, message: str) -> None:
    assert message in refusal(changed(small, (drop,)))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("lens", [4, 3], "meta.b.lens is [4, 3], which sums to 7"),
        ("lens", [0, 6], "meta.b.lens is [0, 6]; expected whole numbers from 1 to 12"),
        ("cfg", [1.0, 2.0], "cfg has 2 values; the schedule has 3 scales"),
        ("tau", [0.0], "meta.b.tau is [0.0]"),
        ("insertion", [-9], "meta.b.insertion is [-9]; expected whole numbers from -3 to 1"),
        ("scales_run", 7, "meta.b.scales_run is 7"),
        ("text", "nowhere", "names array nowhere"),
        ("sched", [[1, 0, 2]], "meta.b.sched is [[1, 0, 2]]"),
        ("sched", [[4096, 4096]], "tokens; expected at most"),
    ],
)
def test_settings_that_do_not_fit_are_named(small: Path, key: str, value: Any, message: str) -> None:
    meta = settings_of(small)
    meta["b"][key] = value
    drop = ("b/text",) if key == "text" else ()
    assert message in refusal(changed(small, drop, meta))


def test_patchify_that_contradicts_the_weights_is_refused(small: Path) -> None:
    meta = settings_of(small) | {"patchify": 1}
    assert "word_embed.weight takes 6 bits; meta.d_vae 6 and meta.patchify 1 give 24" in refusal(
        changed(small, meta=meta)
    )


def test_bits_of_another_shape_are_refused(small: Path) -> None:
    bits = np.zeros((2, 5, 6), np.uint8)
    assert "array b/bits/1 has shape [2, 5, 6]; expected [2, 4, 6]" in refusal(changed(small, b__bits__1=bits))
    assert "values other than 0 and 1" in refusal(changed(small, b__bits__1=bits[:, :4] + 2))


def test_unknown_and_absent_runs_are_told_apart(small: Path) -> None:
    assert "describes no run z; it describes b" in refusal(small, "--run", "z")
    meta = settings_of(small)
    meta["c"] = meta["b"]
    assert "describes run c in its meta, but holds no array of it" in refusal(changed(small, meta=meta), "--run", "c")


def test_decoded_picture_needs_its_latent(tmp_path: Path) -> None:
    path = reference.write_tokenizer_fixture(tmp_path / "tokenizer.npz")
    assert "has no array dec/z" in refusal(changed(path, ("dec/z",)))


def test_other_families_are_not_supported_yet(tmp_path: Path) -> None:
    path = tmp_path / "other.npz"
    weight = {"w/word_table.weight": np.zeros((2, 2), np.float16)}
    np.savez(path, meta=np.array("{}"), **weight)
    assert "family word_text_encoder, which is not supported yet" in refusal(path)


def test_file_without_weights_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "none.npz", meta=np.array("{}"), x=np.zeros(1))
    assert "holds no weights" in refusal(tmp_path / "none.npz")


def test_unknown_option_suggests_the_nearest() -> None:
    result = command("x.npz", "--jsn")
    assert result.exit_code == 2
    assert "--json" in result.stderr
