"""What goes with a model without being part of it: tokenizer, processors of images and sound, generation."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from transformers.models.auto import feature_extraction_auto, image_processing_auto, processing_auto
from transformers.utils.hub import CHAT_TEMPLATE_DIR

__all__ = ["copy_companions"]

OF_MODELS = {
    ".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".py", ".ckpt", ".ot", ".tflite",
}  # fmt: skip
INDEX = re.compile(r"\.index\.(.+\.)?json$")  # of all weights, or of a variant: .index.fp16.json
WRITTEN = {"config.json", "conversion.json"}
PREPROCESSOR = "preprocessor_config.json"


def copy_companions(source: Path, folder: Path, model_type: str) -> None:
    """Copy all but the model itself, with the names of classes that transformers finds by the type of the model alone.

    Args:
        source: the original's checkpoint.
        folder: where to.
        model_type: the original's.
    """
    templates = source / CHAT_TEMPLATE_DIR  # the one directory of theirs: others are models, as a trainer's or ONNX's
    for path in [*source.iterdir(), *templates.glob("*.jinja")]:
        model = path.suffix in OF_MODELS or path.name in WRITTEN or INDEX.search(path.name)
        if path.is_file() and not model:
            target = folder / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)  # a checkpoint may be read-only, and what is written anew there is not
    if (folder / PREPROCESSOR).is_file():
        _name_classes(folder, model_type)


def _name_classes(folder: Path, model_type: str) -> None:
    """Older checkpoints name no classes: of a converted model, whose type is another, nothing else would tell."""
    about = _read(folder / PREPROCESSOR)
    known = about.keys()
    if not known & {"image_processor_type", "feature_extractor_type"}:
        names = vars(image_processing_auto)["IMAGE_PROCESSOR_MAPPING_NAMES"].get(model_type)
        image = names.get("torchvision") or names.get("pil") if isinstance(names, dict) else names
        sound = vars(feature_extraction_auto)["FEATURE_EXTRACTOR_MAPPING_NAMES"].get(model_type)
        found = {"image_processor_type": image, "feature_extractor_type": sound}
        about = about | {key: name for key, name in found.items() if name}
    others = ("processor_config.json", "tokenizer_config.json")
    if not any("processor_class" in _read(folder / name) for name in (PREPROCESSOR, *others)):
        processor = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"].get(model_type)
        about = about | ({"processor_class": processor} if processor else {})
    if about.keys() != known:
        (folder / PREPROCESSOR).write_text(json.dumps(about, indent=2) + "\n")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):  # it is not there, or damaged as it was
        return {}
    return found if isinstance(found, dict) else {}
