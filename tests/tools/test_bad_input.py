"""Every bad input ends with one clear error: the object, what was found, what to do; exit code 2, nothing written."""

import json
import os
import shutil
import threading

import pytest
import torch
from command_line import call, done, listing, refusal, write_model
from conftest import tiny_model
from safetensors.torch import load_file, save_file

from toprovar.exporter.output_folder import replacing
from toprovar.runtime import json_files


@pytest.fixture(scope="module")
def stored(tiny, tmp_path_factory):
    """The tiny model as files. Copy it before damaging it."""
    return write_model(tiny, tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def model(stored, tmp_path):
    return shutil.copytree(stored, tmp_path / "tiny")


@pytest.fixture(scope="module")
def calibrated(stored, tmp_path_factory):
    """A calibration of two prompts."""
    out = tmp_path_factory.mktemp("calibration") / "c"
    done("calibrate", stored, "-o", out, "--limit", 2)
    return out


@pytest.fixture
def plan(calibrated, tmp_path):
    """A plan of the tiny model, to damage."""
    return shutil.copy(calibrated / "plan.json", tmp_path / "plan.json")


def export_refused(model, tmp_path, *options, hint=True):
    """An export that is refused leaves nothing, whatever was wrong."""
    before = listing(tmp_path)
    said = refusal("export", model, "-o", tmp_path / "out", *options, hint=hint)
    assert listing(tmp_path) == before
    return said


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# -- checkpoints -------------------------------------------------------------------------------------------------------


def truncated(path):
    path.write_bytes(path.read_bytes()[:-100])


def extended(path):
    path.write_bytes(path.read_bytes() + b"tail")


def emptied(path):
    path.write_bytes(b"")


def text(path):
    path.write_text("these are no weights, and long enough to be taken for a header")


def replaced_by_a_folder(path):
    path.unlink()
    path.mkdir()


def changed_tensor(change):
    def damage(path):
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return damage


def cut(name):
    return changed_tensor(lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))


def not_a_number(name):
    return changed_tensor(lambda tensors: tensors[name].view(-1)[3:4].fill_(float("nan")))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncated, "truncated"),
        (extended, "trailing"),
        (emptied, "is empty"),
        (text, "bad safetensors header"),
        (replaced_by_a_folder, "holds no checkpoint"),
        (os.unlink, "doesn't exist"),
        (cut("head.weight"), "head.weight has 15 rows; expected 16"),
        (cut("block_chunks.0.module.1.ffn.fc1.weight"), "fc1.weight has the wrong shape"),
        (changed_tensor(lambda tensors: tensors.pop("head.bias")), "head.bias"),
        (not_a_number("head.weight"), "head.weight isn't finite: found 1 of"),
    ],
)
@pytest.mark.parametrize("command", ["export", "calibrate"])
def test_a_damaged_transformer_is_named(command, model, tmp_path, damage, message):
    damage(model / "transformer.safetensors")
    before = listing(tmp_path)
    said = refusal(command, model, "-o", tmp_path / "out")
    assert message in said
    assert "transformer.safetensors" in said or "head.weight" in said
    assert listing(tmp_path) == before


@pytest.mark.parametrize("damage", [truncated, extended, emptied, text, replaced_by_a_folder, os.unlink])
@pytest.mark.parametrize("file", ["transformer", "tokenizer", "text_encoder"])
def test_inspect_names_a_damaged_file(model, file, damage):
    damage(model / f"{file}.safetensors")
    assert f"{file}.safetensors" in refusal("inspect", model)
    assert f"{file}.safetensors" in refusal("inspect", model / f"{file}.safetensors")


def test_a_pickle_that_runs_code_is_refused_and_does_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "pwned"),)

    torch.save({"word_embed.weight": Evil()}, tmp_path / "evil.pth")
    for command in (("inspect",), ("export", "-o", tmp_path / "out"), ("calibrate", "-o", tmp_path / "out")):
        assert "evil.pth" in refusal(command[0], tmp_path / "evil.pth", *command[1:])
    assert listing(tmp_path) == ["evil.pth"]


def test_a_missing_shard_is_named(model, tmp_path):
    names = list(load_file(model / "transformer.safetensors"))
    shards = {name: "model-00001-of-00002.safetensors" for name in names[:-1]}
    shards[names[-1]] = "model-00002-of-00002.safetensors"
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    (model / "transformer.safetensors").rename(model / "model-00001-of-00002.safetensors")
    for said in (refusal("inspect", index), export_refused(index, tmp_path)):
        assert "shard" in said
        assert "model-00002-of-00002.safetensors is missing" in said


def test_files_in_each_other_s_place_are_told_apart(model, tmp_path):
    transformer, tokenizer = model / "transformer.safetensors", model / "tokenizer.safetensors"
    said = export_refused(transformer, tmp_path, "--tokenizer", transformer)
    assert "holds a model of family infinity; expected bit_tokenizer" in said
    said = export_refused(tokenizer, tmp_path, "--tokenizer", tokenizer)
    assert "holds a model of family bit_tokenizer; expected a transformer: infinity" in said
    said = export_refused(model / "text_encoder.safetensors", tmp_path, "--tokenizer", tokenizer)
    assert "word_text_encoder; expected a transformer: infinity" in said
    said = export_refused(model, tmp_path, "--tokenizer", tokenizer)
    assert "brings its own tokenizer" in said


def test_a_tokenizer_of_another_channel_count_is_refused(model, tmp_path):
    other = write_model(tiny_model(bits=16), tmp_path / "other")
    said = export_refused(model / "transformer.safetensors", tmp_path, "--tokenizer", other / "tokenizer.safetensors")
    assert "predicts 8 bits per token, the tokenizer has 16 channels" in said


def test_a_model_file_is_checked(model, tmp_path):
    path = model / "model.json"
    good = path.read_text()
    for changes, message in (
        ({"schema_version": 2}, "schema version 2"),
        ({"surprise": 1}, "surprise"),
        ({"cfg": [1e9]}, "cfg.0"),
        ({"cfg": []}, "cfg"),
        ({"tau": [0]}, "tau.0"),
        ({"tau": [1, 2]}, "tau has 2 values; the schedule has 7 scales"),
        ({"top_p": 2}, "top_p"),
        ({"aspect": -1}, "aspect"),
        ({"budget": "9M"}, "unknown budget 9M"),
        ({"text_tokens": 0}, "text_tokens"),
        ({"text_tokens": 13}, "text_tokens 13; its text encoder has positions for 12"),
        ({"vocabulary": None}, "expected both"),
        ({"tokenizer": "absent.pth"}, "absent.pth doesn't exist"),
    ):
        edit(path, **changes)
        assert message in export_refused(model, tmp_path, hint=False)
        path.write_text(good)
    path.write_text("{")
    assert "model.json is not valid JSON" in export_refused(model, tmp_path)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"schema_version": 1}, "no list of words"),
        ({"schema_version": 1, "words": ["red"]}, "vocabulary starts with"),
        ({"schema_version": 1, "words": ["<pad>", "<unk>", "<end>", "red"]}, "4 words; the word table"),
        ({"schema_version": 3, "words": []}, "schema_version 3"),
        ([], "found schema_version list"),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_named(model, tmp_path, document, message):
    (model / "vocabulary.json").write_text(json.dumps(document))
    said = export_refused(model, tmp_path)
    assert message in said
    assert "vocabulary.json" in said


def test_tables_are_never_read_beyond_their_rows(model, tmp_path):
    said = export_refused(model, tmp_path, "--text-tokens", 13)
    assert "13 text tokens asked for; the text encoder has positions for 12" in said
    cut_levels = changed_tensor(lambda t: t.update({"lvl_embed.weight": t["lvl_embed.weight"][:5].clone()}))
    cut_levels(model / "transformer.safetensors")
    assert "7 scales; the checkpoint has level embeddings for 5" in export_refused(model, tmp_path)


def test_weights_beyond_the_range_of_the_number_format_are_named(model, tmp_path):
    name = "block_chunks.0.module.0.ffn.fc1.weight"
    changed_tensor(lambda t: t[name].view(-1)[:1].fill_(1e6))(model / "transformer.safetensors")
    assert "does not fit into F16" in export_refused(model, tmp_path, "--dtype", "fp16")


# -- plans -------------------------------------------------------------------------------------------------------------

# a plan without notes and pruning, so that nothing in it contradicts its own backbone and schedule
BARE = {"layers": {}, "D": {}, "keep": {}, "score": {}, "restore": {}, "skip_scales": [], "method": "toprovar"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 9}, "schema version 9; this toprovar reads version 2"),
        ({"surprise": 1}, "surprise"),
        ({"tool_version": ["../../etc"]}, "tool_version"),
        (
            {"backbone": {"family": "infinity", "layers": 8, "width": 32, "heads": 2, "bits": 8}, **BARE},
            "layers 8 in the plan",
        ),
        ({"schedule": [[1, 1], [2, 2]], **BARE}, "another schedule: 1x1 2x2 in the plan"),
        ({"schedule": [[1, 1], [2, 2]]}, "the schedule has scales 0 to 1"),
        ({"schedule": [[1, 1]] * 1000}, "schedule"),
        ({"keep": {"6": [256, 256, 100, 256]}}, "multiple of 64"),
        ({"keep": {"6": [256, 256, 320, 256]}}, "keeps 320 tokens at scale 6, layer 2; the scale has 256"),
        ({"keep": {str(k): [0, 0, 0, 0] for k in range(7)}, "score": {}, "restore": {}}, "keeps no token in any layer"),
        ({"score": {"kind": "entropy", "source_layer": {"6": {"9": 8}}}}, "names layer 8 for layer 9 at scale 6"),
        ({"score": {"kind": "entropy", "source_layer": {"66": {"2": 1}}}}, "at scale 66"),
        ({"method": "dense", "skip_scales": [6]}, "of method dense prunes or skips"),
        ({"skip_scales": [3]}, "suffix"),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused(stored, tmp_path, plan, changes, message):
    edit(plan, **changes)
    said = export_refused(stored, tmp_path, "--plan", plan, hint=False)
    assert message in said


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b'{"schema_version": 1', "not valid JSON"),
        (b'{"schema_version": 1, "method": NaN}', "NaN"),
        (b'{"method": "a", "method": "b"}', "'method' stands twice"),
        (b"[" * 10**6, "nested too deeply"),
        (b'{"a":' * 10**5, "not valid JSON"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"null", "plan.json"),
        (b"7", "plan.json"),
        (b"[]", "plan.json"),
        (b'{"schema_version": 1' + b"0" * 5000 + b"}", "plan.json"),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "export"])
def test_an_unreadable_plan_says_why(command, stored, tmp_path, plan, content, message):
    plan.write_bytes(content)
    said = refusal("inspect", plan) if command == "inspect" else export_refused(stored, tmp_path, "--plan", plan)
    assert message in said or "plan.json" in said


def test_a_giant_plan_is_refused_by_its_size(stored, tmp_path, plan):
    with open(plan, "wb") as file:
        file.truncate(json_files.MAX_JSON_BYTES + 1)
    assert "expected at most" in export_refused(stored, tmp_path, "--plan", plan)


def test_plan_and_bundle_in_each_other_s_place_are_told_apart(stored, tmp_path, plan, tiny_bundle):
    assert "is a file; expected a bundle folder" in refusal("run", plan, "-p", "red")
    assert "is a folder; expected a JSON file" in export_refused(stored, tmp_path, "--plan", tiny_bundle)
    said = export_refused(stored, tmp_path, "--plan", tiny_bundle / "manifest.json")
    assert "backbone" in said
    assert "does not exist" in export_refused(stored, tmp_path, "--plan", tmp_path / "absent.json")


def test_inspect_says_what_a_thing_is_not(tmp_path):
    (tmp_path / "notes.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("hello")
    assert "is JSON but no plan" in refusal("inspect", tmp_path / "notes.json")
    assert "unknown ending" in refusal("inspect", tmp_path / "notes.txt")
    assert "holds no checkpoint" in refusal("inspect", tmp_path)
    assert "does not exist" in refusal("inspect", tmp_path / "absent")


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--seed", "-1", "seed -1 is out of range"),
        ("--seed", str(2**63 + 1), "is out of range"),
        ("--seed", "abc", "invalid value 'abc' for '--seed'"),
        ("--seed", "1.5", "invalid value '1.5' for '--seed'"),
        ("--cfg", "abc", "--cfg: 'abc' is not a number"),
        ("--cfg", "", "--cfg: '' is not a number"),
        ("--cfg", "1,2,3", "--cfg has 3 values; the schedule has 6 scales"),
        ("--cfg", "nan", "--cfg: nan is out of range; expected 0 to 1000"),
        ("--cfg", "inf", "--cfg: inf is out of range"),
        ("--cfg", "1e9", "--cfg: 1e+09 is out of range"),
        ("--cfg", "1,2,3,4,5,-6", "--cfg: -6 is out of range"),
        ("--tau", "0", "--tau: 0 is out of range; expected more than 0"),
        ("--tau", "-1", "--tau: -1 is out of range"),
        ("--tau", "nan", "--tau: nan is out of range"),
        ("--threads", "-1", "invalid value '-1' for '--threads'"),
        ("--plan", "fast", "has no variant fast; it has dense, planned"),
        ("--sede", "1", "no such option: --sede hint: did you mean --seed?"),
    ],
)
def test_run_refuses_values_out_of_range(tiny_bundle, tmp_path, option, value, message):
    assert message in refusal("run", tiny_bundle, "-p", "red", "-o", tmp_path / "x.png", f"{option}={value}")
    assert not listing(tmp_path)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--alpha-max", "nan", "'nan' for '--alpha-max'"),
        ("--alpha-max", "1.1", "'1.1' for '--alpha-max'"),
        ("--rho-threshold", "-0.1", "'-0.1' for '--rho-threshold'"),
        ("--rho-threshold", "nan", "'nan' for '--rho-threshold'"),
        ("--beta", "inf", "--beta: inf is not a finite number"),
        ("--target-speedup", "nan", "'nan' for '--target-speedup'"),
        ("--target-speedup", "inf", "--target-speedup: inf is not a finite number"),
        ("--target-speedup", "0.9", "'0.9' for '--target-speedup'"),
        ("--scale-depth", "-1", "'-1' for '--scale-depth'"),
        ("--scale-depth", "7", "--scale-depth is 7; the schedule has scales 0 to 6"),
        ("--global-layers", "0", "'0' for '--global-layers'"),
        ("--global-layers", "5", "--global-layers is 5; the model has 4 layers"),
        ("--limit", "0", "'0' for '--limit'"),
        ("--method", "toprovr", "unknown method toprovr hint: did you mean toprovar?"),
        ("--preset", "half", "'half' for '--preset'"),
        ("--seed", "-1", "seed -1 is out of range"),
        ("--seed", str(2**63), "give a seed up to"),
        ("--aspect", "nan", "aspect nan"),
        ("--aspect", "0", "aspect 0"),
        ("--budget", "9M", "unknown budget 9M"),
        ("--cfg", "1,2", "--cfg has 2 values; the schedule has 7 scales"),
        ("--prompts", "absent.txt", "absent.txt does not exist"),
    ],
)
def test_calibrate_refuses_values_out_of_range_before_any_prompt_runs(stored, tmp_path, option, value, message):
    said = refusal("calibrate", stored, "-o", tmp_path / "c", f"{option}={value}", hint=False)
    assert message in said
    assert not listing(tmp_path)


def test_a_target_out_of_reach_says_what_is_in_reach(stored, calibrated):
    before = (calibrated / "plan.json").read_bytes()
    said = refusal("calibrate", stored, "-o", calibrated, "--limit", 2, "--target-speedup", "1e300")
    assert "target speed-up 1e+300 is out of reach: at most" in said
    assert (calibrated / "plan.json").read_bytes() == before


def test_demo_refuses_more_pictures_than_it_has_prompts(tmp_path):
    assert "--prompts asks for 64 pictures; the demo has 8" in refusal("demo", "-o", tmp_path / "d", "--prompts", 64)
    said = refusal("demo", "-o", tmp_path / "d", "--calibration-prompts", 64)
    assert "--calibration-prompts asks for 64 prompts" in said
    assert "seeds" in refusal("demo", "-o", tmp_path / "d", "--seed", 2**63)
    assert not listing(tmp_path)


# -- prompt files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no prompt"),
        (b"\n \r\n\t\n", "holds no prompt"),
        (b"# one\n  # two\n", "holds no prompt"),
        (b"\xef\xbb\xbf", "holds no prompt"),
        (b"red\0apple\n", "holds NUL"),
        (bytes(range(256)), "is not UTF-8 text (byte 128)"),
        ("red apple".encode("utf-16"), "is not UTF-8 text (byte 0)"),
        (b"\xed\xa0\x80", "is not UTF-8 text"),
    ],
)
def test_a_prompt_file_without_prompts_says_why(stored, tmp_path, content, message):
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    assert message in refusal("calibrate", stored, "-o", tmp_path / "c", "--prompts", path)
    assert listing(tmp_path) == ["prompts.txt"]


def test_a_prompt_file_that_is_a_folder_or_endless_is_refused(stored, tmp_path, monkeypatch):
    assert "is a folder" in refusal("calibrate", stored, "-o", tmp_path / "c", "--prompts", tmp_path)
    monkeypatch.setattr("toprovar.calibrate.statistics.MAX_PROMPTS_BYTES", 2**20)
    assert "more than 1048576 bytes" in refusal("calibrate", stored, "-o", tmp_path / "c", "--prompts", "/dev/zero")


def test_bom_crlf_comments_and_blank_lines_are_understood(stored, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffred apple\r\n\r\n# comment\r\n  שלום 🍎 <script>  \r\n".encode())
    done("calibrate", stored, "-o", tmp_path / "c", "--prompts", path)
    index = json.loads((tmp_path / "c" / "stats" / "index.json").read_text())
    assert index["prompts"] == ["red apple", "שלום 🍎 <script>"]
    page = (tmp_path / "c" / "report.html").read_text()
    assert "<script>" not in page


def test_ten_megabytes_of_prompts_are_read_and_limited(stored, tmp_path, calibrated):
    path = tmp_path / "prompts.txt"
    path.write_text("red apple on white\n" * 550_000)
    done("calibrate", stored, "-o", tmp_path / "c", "--prompts", path, "--limit", 1)
    assert len(json.loads((tmp_path / "c" / "stats" / "index.json").read_text())["prompts"]) == 1


# -- places to write to ------------------------------------------------------------------------------------------------


def unusable(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "at" / "all")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    return [tmp_path / "file" / "x", tmp_path / "loop" / "x", "/proc/x", tmp_path / ("n" * 300)]


def test_places_that_take_no_files_are_refused_before_any_work(stored, tiny_bundle, tmp_path, monkeypatch):
    def never(*arguments, **options):
        raise AssertionError("work began before the place was checked")

    monkeypatch.setattr("toprovar.tools.exporting.load_model", never)
    monkeypatch.setattr("toprovar.tools.calibration.load_model", never)
    monkeypatch.setattr("toprovar.tools.demo.load_model", never)
    monkeypatch.setattr("toprovar.tools.running.open_bundle", never)
    places = unusable(tmp_path)
    before = listing(tmp_path)
    for place in places:
        refusal("export", stored, "-o", place)
        refusal("calibrate", stored, "-o", place)
        refusal("demo", "-o", place)
        refusal("run", tiny_bundle, "-p", "red", "-o", f"{place}/x.png")
        refusal("run", tiny_bundle, "-p", "red", "-o", tmp_path / "x.png", "--preview-dir", place)
    for place in (tmp_path / "file", tmp_path / "file" / "deeper"):
        assert "is a file" in refusal("calibrate", stored, "-o", place)
        assert "is a file" in refusal("export", stored, "-o", place)
    assert "does not end in .png" in refusal("run", tiny_bundle, "-p", "red", "-o", tmp_path / "x.jpg")
    assert listing(tmp_path) == before


def test_a_picture_does_not_replace_a_folder(tiny_bundle, tmp_path):
    assert "is a folder" in refusal("run", tiny_bundle, "-p", "red", "-o", tmp_path)  # a video's frames may go there


def test_a_full_disk_leaves_nothing_behind(stored, tiny_bundle, tmp_path, monkeypatch):
    def full(source, target, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    for arguments in (
        ("export", stored, "-o", tmp_path / "b"),
        ("calibrate", stored, "-o", tmp_path / "c", "--limit", 1),
        ("run", tiny_bundle, "-p", "red", "-o", tmp_path / "x.png"),
    ):
        assert "No space left on device" in refusal(*arguments)
    assert not [name for name in listing(tmp_path) if (tmp_path / name).is_file()]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("thesis.tex", "years of work"),
        ("manifest.json", '{"name": "a web app", "icons": []}'),
        ("manifest.json", '{"schema_version": 1, "tool_version": "0", "files": []}'),
        ("manifest.json", "{"),
    ],
)
def test_a_folder_that_is_no_bundle_is_left_alone(stored, tmp_path, file, content):
    out = tmp_path / "out"
    out.mkdir()
    (out / file).write_text(content)
    (out / "photo.jpg").write_text("precious")
    assert "it is left alone" in refusal("export", stored, "-o", out)
    assert listing(tmp_path) == ["out", *sorted([f"out/{file}", "out/photo.jpg"])]


def test_a_bundle_with_a_file_of_the_user_in_it_is_left_alone(stored, tiny_bundle, tmp_path):
    out = shutil.copytree(tiny_bundle, tmp_path / "out")
    (out / "notes.txt").write_text("mine")
    assert "holds notes.txt, which is no part of the bundle" in refusal("export", stored, "-o", out)
    (out / "notes.txt").unlink()
    assert "already holds a bundle" in refusal("export", stored, "-o", out, "--no-overwrite")
    done("export", stored, "-o", out)
    assert not (out / "step_05_planned.onnx").exists()


def test_the_current_folder_is_not_replaced(stored, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place in (".", "..", tmp_path):
        assert "is the current folder, or above it" in refusal("export", stored, "-o", place)
    assert not listing(tmp_path)


def test_a_linked_folder_stays_linked(stored, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for _ in range(2):
        done("export", stored, "-o", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "manifest.json").exists()
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]


def test_exports_to_one_folder_at_once_leave_one_whole_bundle(tmp_path):
    out, faults, threads = tmp_path / "out", [], 4
    start = threading.Barrier(threads)

    def export(number):
        try:
            start.wait()
            for _ in range(25):
                with replacing(out, True) as folder:
                    for name in ("a", "b", "c"):
                        (folder / name).write_text(str(number))
                    facts = {"schema_version": 1, "tool_version": "", "files": {name: {} for name in "abc"}}
                    (folder / "manifest.json").write_text(json.dumps(facts))
        except BaseException as fault:
            faults.append(fault)

    workers = [threading.Thread(target=export, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not faults
    assert os.listdir(tmp_path) == ["out"]
    assert sorted(os.listdir(out)) == ["a", "b", "c", "manifest.json"]
    assert len({(out / name).read_text() for name in "abc"}) == 1


def test_leftovers_of_a_killed_export_do_not_hinder(stored, tmp_path):
    for stale in (".out.abc123", ".out.old.xyz"):
        (tmp_path / stale).mkdir()
        (tmp_path / stale / "weights.safetensors").write_text("half")
    done("export", stored, "-o", tmp_path / "out")
    assert call("inspect", tmp_path / "out").exit_code == 0


def test_damaged_statistics_are_measured_again(stored, calibrated, tmp_path):
    out = shutil.copytree(calibrated, tmp_path / "c")
    expected = (out / "plan.json").read_bytes()
    first, second = out / "stats" / "prompt_0000.npz", out / "stats" / "prompt_0001.npz"
    raw = first.read_bytes()
    first.write_bytes(raw[: len(raw) // 2])
    second.write_bytes(b"text")
    done("calibrate", stored, "-o", out, "--limit", 2)
    assert (out / "plan.json").read_bytes() == expected
    assert first.read_bytes() == raw


def test_fewer_prompts_do_not_lose_the_measured_ones(stored, calibrated, tmp_path):
    out = shutil.copytree(calibrated, tmp_path / "c")
    expected, stamp = (out / "plan.json").read_bytes(), (out / "stats" / "prompt_0001.npz").stat().st_mtime_ns
    done("calibrate", stored, "-o", out, "--limit", 1)
    assert list(json.loads((out / "stats" / "index.json").read_text())["files"]) == ["prompt_0000.npz"]
    done("calibrate", stored, "-o", out, "--limit", 2)
    assert (out / "plan.json").read_bytes() == expected
    assert (out / "stats" / "prompt_0001.npz").stat().st_mtime_ns == stamp
