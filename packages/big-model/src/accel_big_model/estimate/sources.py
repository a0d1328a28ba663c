"""Models by their text: a folder, a config.json, a callable of the user's, a name on the hub."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from accel_big_model.estimate.inputs import imported
from accel_big_model.estimate.shapes import ModelShape, shape_of_files
from accel_big_model.meta_init import init_empty_weights
from accel_core import NotInstalledError

_CONFIG = "config.json"
_KINDS = "a folder, a config.json, a name on the Hugging Face Hub, or module:function"


def open_model(
    text: str, arguments: Mapping[str, Any] | None = None, trust_remote_code: bool = False
) -> nn.Module | ModelShape:
    """A model without memory; or only its shapes, if there are files and no code.

    Args:
        text: see this module.
        arguments: of the callable.
        trust_remote_code: whether code that comes with a configuration is executed.

    Raises:
        NotInstalledError: it takes transformers.
        ValueError: there is no such model, or it cannot be built.
        CheckpointError, FileNotFoundError: a file of weights is damaged, or missing.
    """
    path = Path(text)
    if path.is_dir():
        return _of_folder(path, trust_remote_code)
    if path.is_file():
        if path.suffix != ".json":
            raise ValueError(f"{path} was to be a model: expected {_KINDS}.")
        return _of_config(path, trust_remote_code)
    if ":" in text:
        return _built(imported(text, "The model", _KINDS), text, arguments or {})
    if path.is_absolute() or text.startswith(".") or text.count("/") > 1:
        raise ValueError(f"{path} was to be a model, and does not exist: expected {_KINDS}.")
    return _of_hub(text, trust_remote_code)


def _of_folder(folder: Path, trust: bool) -> nn.Module | ModelShape:
    has_files = any(folder.glob("*.safetensors"))
    if (folder / _CONFIG).is_file():
        try:
            return _of_config(folder / _CONFIG, trust)
        except NotInstalledError:
            if not has_files:
                raise
    if not has_files:
        raise ValueError(
            f"{folder} has neither {_CONFIG} nor *.safetensors, so there is no model in it to be estimated."
        )
    return shape_of_files(folder)


def _transformers(asked: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise NotInstalledError(
            f"{asked}, which takes transformers, and that is not installed. Type: pip install transformers. Without it, give a "
            f"folder of *.safetensors, or module:function."
        ) from error
    return transformers


def _of_config(file: Path, trust: bool) -> nn.Module:
    library = _transformers(f"{file} was to be a model")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or "model_type" not in content:
            raise ValueError("it has no 'model_type', by which transformers knows a model")
        config = library.AutoConfig.from_pretrained(
            file.parent if file.name == _CONFIG else file, trust_remote_code=trust, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is no configuration of transformers: {_first_line(error)}.") from error
    return _of_transformers(library, config, trust, str(file))


def _of_hub(name: str, trust: bool) -> nn.Module:
    library = _transformers(f"{name!r} is neither a file nor a folder here, so it would be a name on the hub")
    try:
        config = library.AutoConfig.from_pretrained(name, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name!r} is neither a file nor a folder here, and transformers did not find it on the hub: {_first_line(error)} "
            f"Expected {_KINDS}."
        ) from error
    return _of_transformers(library, config, trust, name)


def _of_transformers(library: Any, config: Any, trust: bool, source: str) -> nn.Module:
    names = getattr(config, "architectures", None) or ()
    kind = next((found for name in names if (found := getattr(library, name, None)) is not None), None)
    if kind is not None:
        return _built(kind._from_config, source, {"config": config})
    return _built(library.AutoModel.from_config, source, {"config": config, "trust_remote_code": trust})


def _built(factory: Any, source: str, arguments: Mapping[str, Any]) -> nn.Module:
    try:
        with init_empty_weights():
            model = factory(**arguments)
    except Exception as error:
        raise ValueError(f"{source} could not be built without memory: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{source} was to return a torch.nn.Module, and returned {type(model).__name__}.")
    return model


@contextmanager
def working_directory() -> Iterator[None]:
    """Modules of the working directory can be imported inside, as in `python -m`."""
    here = os.getcwd()
    if here in sys.path:
        yield
        return
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
