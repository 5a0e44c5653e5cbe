"""Builds the demo model's data: fetches the pinned packages, joins, curates, renders, packs.

    python -m toprovar.tools.train_demo.prepare --out .data/demo

Writes `sprites.npz` (256x256 RGBA sprites as WebP, one entry each), `concepts.json` (names, tags, styles, sources,
licences). Needs npm and `resvg_py`; the downloads stay in `packages` beside the
folder and are not fetched twice.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from toprovar.runtime.errors import EnvironmentFault, ToprovarError
from toprovar.tools.train_demo import curation

SPRITE_SIZE = 256
WEBP_QUALITY = 92
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Package:
    """One pinned npm package. `style` is "" for the labels."""

    name: str
    version: str
    licence: str
    author: str
    style: str

    @property
    def archive(self) -> str:
        return f"{self.name.lstrip('@').replace('/', '-')}-{self.version}.tgz"


PACKAGES = (
    Package("@iconify-json/noto", "1.2.9", "Apache-2.0", "Google Inc. (Noto Emoji)", "noto"),
    Package("@iconify-json/noto-v1", "1.2.5", "Apache-2.0", "Google Inc. (Noto Emoji v1)", "blob"),
    Package("@iconify-json/fluent-emoji-flat", "1.2.6", "MIT", "Microsoft Corporation (Fluent Emoji)", "flat"),
    Package("@lobehub/fluent-emoji-3d", "1.1.0", "MIT", "Microsoft Corporation (Fluent Emoji); LobeHub", "3d"),
    Package("emojibase-data", "17.0.0", "MIT", "Miles Johnson (emojibase)", ""),
)


def fetch(package: Package, folder: Path) -> Path:
    """Downloads one package with `npm pack` unless its archive is there. Returns the archive."""
    archive = folder / package.archive
    if archive.exists():
        return archive
    npm = shutil.which("npm")
    if npm is None:
        raise EnvironmentFault("npm is not on the PATH; it fetches the icon packages", "install Node.js with npm")
    print(f"fetching {package.name}@{package.version}", file=sys.stderr)
    command = [npm, "pack", "--silent", f"{package.name}@{package.version}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode or not archive.exists():
        raise EnvironmentFault(
            f"npm pack {package.name}@{package.version} failed: {done.stderr.strip()[-300:] or 'no archive written'}",
            "check the connection to the npm registry",
        )
    return archive


def slug(label: str) -> str:
    """Icon name of a label, as the icon packages build them."""
    return re.sub(r"[^a-z0-9]+", "-", label.lower().replace("’", "")).strip("-")


class IconSet:
    """SVG icons of one iconify package, found by code point or by the label's slug."""

    def __init__(self, archive: Path) -> None:
        with tarfile.open(archive) as tar:
            self._data = _json_member(tar, "package/icons.json")
            characters = _json_member(tar, "package/chars.json")
        self._name_of = {curation.bare_hexcode(code): name for code, name in characters.items()}

    def name_for(self, hexcode: str, label: str) -> str | None:
        for name in (self._name_of.get(hexcode), slug(label)):
            if name is not None and (name in self._data["icons"] or name in self._data.get("aliases", {})):
                return name
        return None

    def svg(self, name: str) -> str:
        """Standalone SVG, padded to a square."""
        icon = self._data["icons"].get(name)
        if icon is None:
            alias = self._data["aliases"][name]
            icon = {**self._data["icons"][alias["parent"]], **{k: v for k, v in alias.items() if k != "parent"}}
        width = icon.get("width", self._data.get("width", 16))
        height = icon.get("height", self._data.get("height", 16))
        side = max(width, height)
        left = icon.get("left", 0) - (side - width) / 2
        top = icon.get("top", 0) - (side - height) / 2
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="{SPRITE_SIZE}" '
            f'height="{SPRITE_SIZE}" viewBox="{left} {top} {side} {side}">{icon["body"]}</svg>'
        )


class WebpSet:
    """Ready-made 256x256 pictures of the 3d package, found by code point."""

    def __init__(self, archive: Path) -> None:
        self._files: dict[str, bytes] = {}
        self._names: dict[str, str] = {}
        with tarfile.open(archive) as tar:
            for member in tar:
                path = Path(member.name)
                if path.suffix == ".webp" and path.parent.name == "assets":
                    reader = tar.extractfile(member)
                    if reader is not None:
                        code = curation.bare_hexcode(path.stem)
                        self._files[code] = reader.read()
                        self._names[code] = path.name

    def name_for(self, hexcode: str, label: str) -> str | None:
        return self._names.get(hexcode)

    def data(self, hexcode: str) -> bytes:
        return self._files[hexcode]


def _json_member(tar: tarfile.TarFile, name: str) -> Any:
    reader = tar.extractfile(name)
    if reader is None:
        raise ToprovarError(f"{tar.name!s} has no {name}", "delete the archive and fetch it again")
    return json.loads(reader.read())


def _square(image: Image.Image) -> Image.Image:
    image = image.convert("RGBA")
    side = max(image.size)
    if image.size != (side, side):
        canvas = Image.new("RGBA", (side, side))
        canvas.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        image = canvas
    return image.resize((SPRITE_SIZE, SPRITE_SIZE), Image.Resampling.LANCZOS) if side != SPRITE_SIZE else image


def trimmed(image: Image.Image) -> Image.Image:
    """Crops the transparent border and scales the drawing so that its longer side fills the sprite."""
    box = image.getchannel("A").point(lambda a: 255 if a > 8 else 0).getbbox()
    if box is None:
        return image
    image = image.crop(box)
    factor = SPRITE_SIZE / max(image.size)
    size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
    image = image.convert("RGBa").resize(size, Image.Resampling.LANCZOS).convert("RGBA")
    canvas = Image.new("RGBA", (SPRITE_SIZE, SPRITE_SIZE))
    canvas.paste(image, ((SPRITE_SIZE - size[0]) // 2, (SPRITE_SIZE - size[1]) // 2))
    return canvas


def _webp(image: Image.Image) -> np.ndarray:
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=WEBP_QUALITY, method=4)
    return np.frombuffer(buffer.getvalue(), np.uint8)


def render(icons: IconSet | WebpSet, name: str, hexcode: str) -> np.ndarray:
    """One sprite as WebP bytes, uint8 [n]."""
    if isinstance(icons, WebpSet):
        return _webp(trimmed(_square(Image.open(io.BytesIO(icons.data(hexcode))))))
    try:
        import resvg_py
    except ImportError as error:
        raise EnvironmentFault("resvg_py is missing; it renders the icons", "pip install resvg_py==0.5.0") from error
    png = resvg_py.svg_to_bytes(svg_string=icons.svg(name), width=SPRITE_SIZE, height=SPRITE_SIZE)
    return _webp(trimmed(_square(Image.open(io.BytesIO(bytes(png))))))


def build(out: Path, scale: float) -> dict[str, Any]:
    """Writes the pack. Returns the facts that concepts.json starts with."""
    out.mkdir(parents=True, exist_ok=True)
    packages_folder = out.parent / "packages"
    packages_folder.mkdir(exist_ok=True)
    archives = {package: fetch(package, packages_folder) for package in PACKAGES}
    labels = next(package for package in PACKAGES if not package.style)
    with tarfile.open(archives[labels]) as tar:
        emojibase = _json_member(tar, "package/en/data.json")
        subgroup_names = _json_member(tar, "package/meta/groups.json")["subgroups"]
    icon_sets: dict[str, IconSet | WebpSet] = {
        package.style: (WebpSet if package.style == "3d" else IconSet)(archives[package])
        for package in PACKAGES
        if package.style
    }
    names = {
        (style, curation.bare_hexcode(e["hexcode"])): icons.name_for(curation.bare_hexcode(e["hexcode"]), e["label"])
        for style, icons in icon_sets.items()
        for e in emojibase
    }
    drawn = {style: {code for (s, code), name in names.items() if s == style and name} for style in icon_sets}
    chosen = curation.select(curation.candidates_from(emojibase, subgroup_names, drawn), scale)
    captions = curation.concept_names(chosen)
    tags = curation.usable_tags(captions, chosen)
    jobs = [(c, style, str(names[style, c.hexcode])) for c in chosen for style in c.styles]
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        encoded = list(pool.map(lambda job: render(icon_sets[job[1]], job[2], job[0].hexcode), jobs))
    arrays = {f"{job[0].hexcode}/{job[1]}": data for job, data in zip(jobs, encoded, strict=True)}
    partial = out / "sprites.partial.npz"
    np.savez(partial, **arrays)  # type: ignore[arg-type]
    partial.replace(out / "sprites.npz")
    package_of = {package.style: package for package in PACKAGES}
    document = {
        "schema_version": SCHEMA_VERSION,
        "command": "python -m toprovar.tools.train_demo.prepare",
        "sprite_size_px": SPRITE_SIZE,
        "packages": [
            {
                "name": p.name,
                "version": p.version,
                "licence": p.licence,
                "author": p.author,
                "style": p.style,
                "sha256": hashlib.sha256(archives[p].read_bytes()).hexdigest(),
            }
            for p in PACKAGES
        ],
        "sprites_sha256": hashlib.sha256((out / "sprites.npz").read_bytes()).hexdigest(),
        "concepts": [
            {
                "name": name,
                "label": concept.label,
                "tags": concept_tags,
                "hexcode": concept.hexcode,
                "subgroup": concept.subgroup,
                "styles": {
                    style: {
                        "package": package_of[style].name,
                        "file": names[style, concept.hexcode],
                        "licence": package_of[style].licence,
                    }
                    for style in concept.styles
                },
            }
            for name, concept, concept_tags in zip(captions, chosen, tags, strict=True)
        ],
    }
    partial_json = out / "concepts.partial.json"
    partial_json.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    partial_json.replace(out / "concepts.json")
    return document


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m toprovar.tools.train_demo.prepare", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the pack; created if missing")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies every subgroup's quota (default 1.0)")
    options = parser.parse_args(arguments)
    try:
        document = build(options.out, options.scale)
    except ToprovarError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    sprites = sum(len(c["styles"]) for c in document["concepts"])
    size_mb = (options.out / "sprites.npz").stat().st_size / 1e6
    print(
        f"wrote {options.out} ({len(document['concepts'])} concepts, {sprites} sprites, {size_mb:.1f} MB); "
        f"next: python -m toprovar.tools.train_demo.train all --data {options.out} --out DIR --minutes 24"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
