"""Write scikit-learn's handwritten digits as a `mnist_png` folder tree: OUTPUT/{training,testing}/<digit>/<n>.png.

They are 1,797 real digits of 8x8 pixels, scaled to MNIST's 28x28, and come with scikit-learn, so nothing is downloaded.
The tree appears complete or not at all: it is written beside OUTPUT and renamed. Running it again changes nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

MARKER = "COMPLETE"
"""Written last; its text counts the images."""

TEST_EVERY = 5
"""Of each digit's images every fifth is for testing: the same split at every run, the same share of every digit."""


def make(output: Path) -> str:
    """Make the tree at `output` unless it is there, and return one sentence about it.

    Raises:
        SystemExit: With one sentence, and with `output` as it was.
    """
    if (output / MARKER).is_file():
        return f"{output} is complete: {(output / MARKER).read_text().strip()}"
    if output.exists() and not output.is_dir():
        raise SystemExit(f"--output {output} is a file, not a folder")
    if output.exists() and any(output.iterdir()):
        raise SystemExit(f"--output {output} has other things in it; name a new or an empty folder")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
        try:
            summary = _write_tree(unfinished)
            unfinished.chmod(0o755)
            os.replace(unfinished, output)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        if (output / MARKER).is_file():  # another process was faster
            return f"{output} is complete: {(output / MARKER).read_text().strip()}"
        raise SystemExit(f"cannot write --output {output}: {error.strerror}") from None
    return f"{output} is written: {summary}"


def _write_tree(root: Path) -> str:
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SystemExit(f"this needs scikit-learn and pillow, and {error.name} is not installed") from None
    digits = load_digits()
    of_digit = [0] * 10
    written = {"training": 0, "testing": 0}
    for split in written:
        for digit in range(10):
            (root / split / str(digit)).mkdir(parents=True)
    for number, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        split = "testing" if of_digit[digit] % TEST_EVERY == TEST_EVERY - 1 else "training"
        of_digit[digit] += 1
        written[split] += 1
        image = Image.fromarray((pixels * (255 / 16)).astype("uint8")).resize((28, 28), Image.Resampling.BICUBIC)
        image.save(root / split / str(digit) / f"{number}.png")
        if number % 300 == 299:
            sys.stderr.write(f"{number + 1} of {len(digits.images)} images\n")
    summary = f"{written['training']} images for training, {written['testing']} for testing"
    (root / MARKER).write_text(summary + "\n")
    return summary


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="the folder to make")
    sys.stdout.write(make(parser.parse_args().output) + "\n")


if __name__ == "__main__":
    main()
