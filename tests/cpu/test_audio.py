"""Hugging Face models that take sounds: their examples fit them, whole and shrunk; what has no examples is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from meshwright.core.errors import InputError
from meshwright.models.objective import call
from meshwright.models.source import resolve

FOLDER = Path(__file__).parents[1] / "survey" / "audio"


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.json")), ids=lambda file: file.stem)
@pytest.mark.parametrize("whole", [False, True], ids=["shrunk", "whole"])
def test_examples_fit(file: Path, whole: bool) -> None:
    source = resolve(f"hf:{file}")
    source = source if whole else source.small()
    assert source.example is not None
    batch = source.example(2)
    first, second = (source.objective.loss(call(module, batch), batch) for module in [source.build()] * 2)
    assert first.isfinite()
    if not whole:
        torch.testing.assert_close(first, second, rtol=0, atol=0)  # nothing in it is drawn at random


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"]}, "Wav2Vec2ForCTC"),
        ({"model_type": "patchtst", "architectures": ["PatchTSTForPrediction"]}, "patchtst"),
        ({"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": [16, 32]}, "16, 32"),
    ],
)
def test_what_has_no_examples_is_refused(tmp_path: Path, fields: dict[str, object], said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(InputError, match=said):
        resolve(f"hf:{tmp_path}/config.json")
