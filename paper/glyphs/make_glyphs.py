"""Make glyphs.npz: letters of free fonts, 28 x 28 gray, for the plan glyphs.

    apt-get install --no-install-recommends PACKAGES   # those of packages.txt, Debian 12
    python paper/glyphs/make_glyphs.py data/glyphs.npz --sheet sheet.png

Every font file of these packages that has all letters A-Z and a-z gives 52 images. A letter is
drawn large, then scaled so that its box fills 20 x 20 pixels, as MNIST's digits do, and centered.
Fonts whose letters are equal to those of another font are left out. Packages, not images, are split
into train, val and test (8 : 1 : 1), so that all styles of a family are in one part. The seed of
the split is fixed; the images depend on the versions of the packages and of FreeType.
"""

from __future__ import annotations

import argparse
import random
import subprocess
from pathlib import Path

import numpy as np
from fontTools.ttLib import TTFont
from PIL import Image, ImageDraw, ImageFont

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
PACKAGES = Path(__file__).with_name("packages.txt")
SUFFIXES = (".ttf", ".otf")
LARGE = 112  # pixels of a letter that is drawn, before it is scaled
BOX = 20
SIZE = 28
SEED = 1
MOST_FONTS = 12  # of a package: some have hundreds


def font_files(package: str) -> list[Path]:
    """The fonts of an installed package."""
    listed = subprocess.run(["dpkg", "-L", package], capture_output=True, text=True, check=True)
    paths = [Path(line) for line in listed.stdout.splitlines()]
    return sorted(path for path in paths if path.suffix.lower() in SUFFIXES and path.is_file())


def draw_letter(font: ImageFont.FreeTypeFont, letter: str) -> np.ndarray | None:
    """A letter in the middle of its image; None if the font draws nothing for it."""
    left, top, right, bottom = font.getbbox(letter)
    width, height = right - left, bottom - top
    if width < 4 or height < 4:
        return None
    large = Image.new("L", (round(width), round(height)))
    ImageDraw.Draw(large).text((-left, -top), letter, fill=255, font=font)
    scale = BOX / max(width, height)
    small = (max(1, round(width * scale)), max(1, round(height * scale)))
    image = Image.new("L", (SIZE, SIZE))
    corner = ((SIZE - small[0]) // 2, (SIZE - small[1]) // 2)
    image.paste(large.resize(small, Image.Resampling.BOX), corner)
    return np.asarray(image)


def draw_font(path: Path) -> np.ndarray | None:
    """The letters of a font, (52, 28, 28); None if it lacks some, or draws all of them alike."""
    try:
        characters = TTFont(path, lazy=True).getBestCmap() or {}
        font = ImageFont.truetype(str(path), LARGE)
        images = [draw_letter(font, letter) for letter in LETTERS if ord(letter) in characters]
    except (OSError, KeyError, ValueError, AttributeError):
        return None
    drawn = [image for image in images if image is not None and image.max() > 127]
    distinct = {image.tobytes() for image in drawn}
    if len(drawn) < len(LETTERS) or len(distinct) < 20:
        return None
    return np.stack(drawn)


def main() -> None:
    """Write the file, and a sheet of letters to look at."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--sheet", type=Path, help="a picture of some letters of each part")
    args = parser.parse_args()
    noise = random.Random(SEED)
    packages = PACKAGES.read_text().split()
    noise.shuffle(packages)
    shares = {"test": packages[0::10], "val": packages[1::10]}
    shares["train"] = [name for name in packages if name not in shares["test"] + shares["val"]]
    seen: set[bytes] = set()
    parts: dict[str, np.ndarray] = {}
    for part, names in shares.items():
        fonts: list[np.ndarray] = []
        for name in names:
            paths = font_files(name)
            noise.shuffle(paths)
            drawn = [letters for path in paths if (letters := draw_font(path)) is not None]
            new = [letters for letters in drawn if letters.tobytes() not in seen]
            seen |= {letters.tobytes() for letters in new}
            fonts += new[:MOST_FONTS]
        parts[part] = np.concatenate(fonts)
        print(f"{part}: {len(names)} packages, {len(fonts)} fonts, {len(parts[part])} images")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.output, **parts)
    if args.sheet:
        rows = []
        for images in parts.values():
            fonts_shown = images.reshape(-1, len(LETTERS), SIZE, SIZE)[::2][:24, ::2]
            rows += [np.concatenate(list(letters), 1) for letters in fonts_shown]
        Image.fromarray(np.concatenate(rows)).save(args.sheet)


if __name__ == "__main__":
    main()
