"""A manifest with decisions: what they read is there, and every step can be reached and fits what comes before."""

import json
import re

import pytest
from conftest import GUIDANCE
from plans import DECIDED, plan_of

from toprovar.exporter.bundle_writer import export_bundle
from toprovar.exporter.planned.step import StepOptions
from toprovar.runtime.bundle import open_bundle
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.manifest import Manifest
from toprovar.runtime.signatures import check_signatures

NAMES = {
    "rho": "rho crosses in between",
    "skipvar": "skipvar 0, 1",
    "mass": "energy mass .9, guidance decided, l2",
}


@pytest.fixture(scope="module")
def manifests(tiny, tmp_path_factory):
    """The manifests of three plans that decide, as JSON."""
    found = {}
    for key, name in NAMES.items():
        folder = tmp_path_factory.mktemp(key) / "b"
        export_bundle(tiny, folder, GUIDANCE, StepOptions(text_tokens=12), plan_of(tiny, **DECIDED[name]))
        found[key] = open_bundle(folder).manifest.model_dump_json()
    return found


def step_at(steps, **values):
    return next(step for step in steps if all(step[name] == value for name, value in values.items()))


def without_entropy(manifest):
    del step_at(manifest["variants"]["planned"], scale=4, path="")["graph"]["outputs"]["entropy_mean"]


def without_gap(manifest):
    del step_at(manifest["variants"]["planned"], scale=4, guided=True)["graph"]["outputs"]["guidance_gap"]


def without_pictures(manifest):
    manifest["small_decoder"] = None


def without_choice(manifest):
    manifest["decisions"] = [d for d in manifest["decisions"] if d["kind"] != "energy_mass"]


def without_score(manifest):
    step = step_at(manifest["variants"]["planned"], scale=3)
    del step["graph"]["outputs"]["score_next"]


def with_less_room(manifest):
    for step in manifest["variants"]["planned"]:
        if step["scale"] == 5:
            step["past"] = [n - 64 for n in step["past"]]
            for name, facts in step["graph"]["inputs"].items():
                if name.startswith(("k_past", "v_past")):
                    facts["shape"][0] -= 64


def with_closed_cache(manifest):
    for facts in step_at(manifest["variants"]["planned"], scale=5)["graph"]["inputs"].values():
        facts["is_open"] = False


def with_another_path(manifest):
    step_at(manifest["variants"]["planned"], scale=5, path="D4")["path"] = "D9"


def with_images(manifest):
    manifest["images"] = 2
    for step in manifest["variants"]["dense"]:
        step["images"] = 2


@pytest.mark.parametrize(
    ("key", "damage", "message"),
    [
        ("rho", without_entropy, r"no output entropy_mean, which a decision reads"),
        ("mass", without_gap, r"no output guidance_gap, which a decision reads"),
        ("skipvar", without_pictures, r"skipvar decision and no small_decoder"),
        ("mass", without_choice, r"4 steps of variant planned at scale 4 and no choice"),
        ("mass", without_score, r"step_04_planned\S* an input score, which nothing provides"),
        ("mass", with_less_room, r"cached keys; the steps before it leave"),
        ("mass", with_closed_cache, r"cached keys; the steps before it leave"),
        ("rho", with_another_path, r"which no decision leads to"),
        ("rho", with_images, r"no steps of variant dense for one image"),
    ],
)
def test_a_manifest_that_contradicts_its_decisions_is_refused(manifests, key, damage, message):
    manifest = json.loads(manifests[key])
    check_signatures(Manifest.model_validate(manifest))
    damage(manifest)
    with pytest.raises(ToprovarError) as caught:
        check_signatures(Manifest.model_validate(manifest))
    assert re.search(message, caught.value.message), caught.value.message
