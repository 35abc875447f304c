"""Make photographs.npz: small photographs in color, for the plan photographs.

    apt-get download $(cat packages.txt)                  # Debian 12
    for package in *.deb; do dpkg-deb -x $package root; done
    python paper/photographs/make_photographs.py root data/photographs.npz --sheet sheet.png

`photographs.txt` lists the files that are used; all other pictures of these packages are left out,
because they are drawings, renderings, screenshots, or other versions of a listed photograph. The
photographs of one line show one scene or have one series of names, so they are in one part. Lines,
not photographs, are split into train, val and test (8 : 1 : 1); long lines are in train. The seed
of the split is fixed. A photograph is scaled so that its shorter side has 160 pixels, and its
longer side is cut to 320. The model's data module cuts squares of 64 pixels out of them.

The file has, for each part, the pixels of all photographs, row after row, and their heights and
widths. Neighbors are subtracted, so that the file is small; `photographs.py` adds them up again.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np
from PIL import Image

LISTED = Path(__file__).with_name("photographs.txt")
SHORTER = 160  # pixels of a photograph's shorter side
LONGER = 2 * SHORTER  # most pixels of its longer side
SEED = 1
LONG_LINE = 8  # photographs; longer lines are in train
SHOWN = 60  # photographs of a part on the sheet


def small_photograph(path: Path) -> np.ndarray:
    """The photograph in its small size, (H, W, 3)."""
    with Image.open(path) as opened:
        image = opened.convert("RGB")
    factor = SHORTER / min(image.size)
    width, height = (max(SHORTER, round(length * factor)) for length in image.size)
    image = image.resize((width, height), Image.Resampling.LANCZOS, reducing_gap=4)
    left = max(0, (width - LONGER) // 2)
    top = max(0, (height - LONGER) // 2)
    return np.asarray(image.crop((left, top, width - left, height - top)))[:LONGER, :LONGER]


def split(lines: list[list[str]]) -> dict[str, list[str]]:
    """Files of each part; a line is in one part."""
    lines = sorted(lines)
    random.Random(SEED).shuffle(lines)
    lines.sort(key=lambda files: len(files) > LONG_LINE)  # keeps the order of the others
    tenth = sum(map(len, lines)) / 10
    parts: dict[str, list[str]] = {"test": [], "val": [], "train": []}
    for files in lines:
        part = next(name for name in parts if name == "train" or len(parts[name]) < tenth)
        parts[part] += files
    return parts


def differences(photographs: list[np.ndarray]) -> np.ndarray:
    """Pixels (n, 3) of all photographs: green, and red and blue less green, each less its left."""
    pixels = np.concatenate([photograph.reshape(-1, 3) for photograph in photographs])
    red, green, blue = pixels.T
    channels = np.stack([green, red - green, blue - green])  # modulo 256
    return np.diff(channels, axis=1, prepend=np.uint8(0))


def sheet(photographs: list[np.ndarray]) -> np.ndarray:
    """The left upper squares of some photographs, half as large, in rows of twenty."""
    chosen = photographs[:: max(1, len(photographs) // SHOWN)][:SHOWN]
    tiles = [photograph[:SHORTER:2, :SHORTER:2] for photograph in chosen]
    tiles += [np.zeros_like(tiles[0])] * (-len(tiles) % 20)
    rows = [np.concatenate(tiles[i : i + 20], 1) for i in range(0, len(tiles), 20)]
    return np.concatenate(rows)


def main() -> None:
    """Write the file, and a sheet of photographs to look at."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", type=Path, help="folder of the unpacked packages")
    parser.add_argument("output", type=Path)
    parser.add_argument("--listed", type=Path, default=LISTED, help="a line of files for a scene")
    parser.add_argument("--sheet", type=Path, help="a picture of some photographs of each part")
    args = parser.parse_args()
    lines = [line.split() for line in args.listed.read_text().splitlines()]
    missing = [name for files in lines for name in files if not (args.root / name).is_file()]
    if missing:
        parser.error(f"{args.root} has no {missing[0]}, and lacks {len(missing)} files in all")
    arrays: dict[str, np.ndarray] = {}
    sheets = []
    for part, names in split(lines).items():
        photographs = [small_photograph(args.root / name) for name in names]
        arrays[part] = differences(photographs)
        arrays[f"{part}_sizes"] = np.array([x.shape[:2] for x in photographs], np.int32)
        sheets.append(sheet(photographs))
        print(f"{part}: {len(names)} photographs, {arrays[part].shape[1]} pixels")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.output, **arrays)
    print(f"{args.output}: {args.output.stat().st_size / 1e6:.1f} MB")
    if args.sheet:
        Image.fromarray(np.concatenate(sheets)).save(args.sheet)


if __name__ == "__main__":
    main()
