"""A folder of real pictures as samples: one folder a class, every tenth picture of a class kept for validation."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from meshwright.core.errors import InputError
from meshwright.models.examples import ImageShape
from meshwright.models.objective import Batch
from meshwright.training.corpus import Split

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
KEPT_FOR_VALIDATION = 10
"""One picture in so many."""


def check_pictures(folder: Path) -> None:
    """Refused before any rank starts: a folder that is missing or empty, and a machine that cannot read pictures."""
    if importlib.util.find_spec("PIL") is None:
        raise InputError(f"data source 'images:{folder}' needs Pillow to read pictures: pip install pillow")
    if not folder.is_dir():
        raise InputError(f"data source 'images:{folder}': no such folder: {folder}")
    if not any(_pictures(one) for one in _classes(folder)):
        raise InputError(f"data source 'images:{folder}' has no pictures: it wants one folder of pictures a class")


class FolderImages:
    """Pictures are cut to a square around their middle and made as large as the model takes; values from -1 to 1."""

    def __init__(self, folder: Path, shape: ImageShape, split: Split) -> None:
        classes = _classes(folder)
        if len(classes) > shape.classes:
            raise InputError(
                f"{folder} has {len(classes)} classes, but the model tells {shape.classes} apart: set classes={len(classes)}"
            )
        self.shape = shape
        self.files = [
            (file, label)
            for label, one in enumerate(classes)
            for number, file in enumerate(_pictures(one))
            if (number % KEPT_FOR_VALIDATION == KEPT_FOR_VALIDATION - 1) == (split == "validation")
        ] or [(file, label) for label, one in enumerate(classes) for file in _pictures(one)]

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, numbers: Sequence[int]) -> Batch:
        chosen = [self.files[number] for number in numbers]
        return {
            "pixel_values": torch.stack([self._pixels(file) for file, _ in chosen]),
            "labels": torch.tensor([label for _, label in chosen]),
        }

    def _pixels(self, file: Path) -> Tensor:
        from PIL import Image, ImageOps

        size, channels = self.shape.size, self.shape.channels
        try:
            with Image.open(file) as picture:
                fitted = ImageOps.fit(picture.convert("RGB" if channels == 3 else "L"), (size, size))
        except OSError as error:
            raise InputError(
                f"{file}: not a picture that can be read: {error}: remove it, or give another folder"
            ) from error
        values = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8)
        return values.view(size, size, channels).permute(2, 0, 1).float() / 127.5 - 1


def _classes(folder: Path) -> list[Path]:
    return sorted(one for one in folder.iterdir() if one.is_dir())


def _pictures(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES)
