"""What both ways of training on the digits share: the images, the model, and a way to say something."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from PIL import Image, UnidentifiedImageError
from torch import nn
from torch.utils.data import TensorDataset


def say(line: str) -> None:
    """Print a line in one write, so that the lines of two processes do not mix."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def load_images(flag: str, root: Path) -> TensorDataset:
    """All images of `root`/<digit>/*.png, in one order on every host; they stay in memory as bytes.

    Raises:
        SystemExit: With one sentence that names the flag.
    """
    files = sorted((int(file.parent.name), file.name, file) for file in root.glob("[0-9]/*.png"))
    if not files:
        raise SystemExit(f"{flag} {root} holds no images <digit>/<name>.png; make_mnist_png.py makes such a folder")
    images = torch.empty(len(files), 1, 28, 28, dtype=torch.uint8)
    for place, (_, _, file) in enumerate(files):
        try:
            with Image.open(file) as image:
                pixels = bytearray(image.convert("L").tobytes())
        except (OSError, UnidentifiedImageError):
            raise SystemExit(f"{flag}: {file} is not a readable image") from None
        if len(pixels) != 28 * 28:
            raise SystemExit(f"{flag}: {file} is not 28x28 pixels")
        images[place] = torch.frombuffer(pixels, dtype=torch.uint8).view(1, 28, 28)
    return TensorDataset(images, torch.tensor([digit for digit, _, _ in files]))


class Net(nn.Module):
    """Two convolutions and two linear layers: small enough for one slow core, good for 97 % and more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """From bytes (n, 1, 28, 28) to the scores of ten digits."""
        return self.layers(images.float() / 255)
