"""Images of any kind, made into one: (height, width, channels), uint8, on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from accel_trackers.recording.scalars import UnreadableError, as_array, describe, is_array, readable_here, said

FORMATS = ("HW", "CHW", "HWC", "NHW", "NCHW", "NHWC")
"""How the dimensions of images are ordered: number, height, width, channels."""

_CHANNELS = (1, 3, 4)  # grey; red, green and blue; the same with opacity
_ROUNDING = 0.01  # by which floats may overstep 0…1: more than bfloat16 does, less than one sees
_BRIGHTEST = 16.0  # of floats that overshoot or were standardised; those above may go up to 255
_NAMES = {"N": "number", "H": "height", "W": "width", "C": "channels"}


def as_images(values: Mapping[str, Any], dataformats: str | None = None) -> dict[str, list[torch.Tensor]]:
    """Images as trackers get them, by name: each (height, width, channels) with 1, 3 or 4 channels, uint8, on the CPU.

    They are copies, taken now; images on a device are waited for. Names without any image, such as
    an empty batch, are left out.

    Args:
        values: name → an image, a batch, or a list of these. Tensors are (C, H, W), (N, C, H, W) or
            (H, W); arrays (H, W, C), (N, H, W, C) or (H, W); images of PIL are what they are.
            Floats go from 0 to 1, but for rounding; nan and -inf are 0, inf is 1. uint8 goes from 0
            to 255; False is black and True white.
        dataformats: the order of the dimensions of tensors and arrays, one of `FORMATS`; the N may
            stand there or not. None: as above.

    Raises:
        ValueError: for another format, for shapes and dtypes that no image has, for floats in
            another range, such as -1…1 or 0…255, and for what has no pixels that can be read; each
            with the name.
    """
    layout = None
    if dataformats is not None:
        if dataformats not in FORMATS:
            raise ValueError(f"log_images(dataformats={dataformats!r}): expected one of {', '.join(FORMATS)}, or None.")
        layout = dataformats.removeprefix("N")
    images = {name: [*_images(name, value, layout)] for name, value in values.items()}
    return {name: each for name, each in images.items() if each}


def _images(name: str, value: Any, layout: str | None) -> Iterator[torch.Tensor]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _images(name, each, layout)
    elif isinstance(value, torch.Tensor):
        try:
            tensor = readable_here(value)
        except UnreadableError as error:
            raise ValueError(f"log_images(): {name!r} is {error}.") from None
        yield from _of_tensor(name, tensor, layout, "CHW", describe(value))
    elif _is_picture(value):
        yield _of_picture(name, value)
    elif is_array(value):
        array = _array(name, value)
        _check_dtype(name, array.dtype.kind in "bf" or array.dtype.name == "uint8", array.dtype)
        if array.dtype.kind == "f":
            array = array.astype("float32")  # torch lacks some of the others
        yield from _of_tensor(name, _from_array(array), layout, "HWC", describe(value))
    else:
        raise ValueError(
            f"log_images(): {name!r} is {describe(value)}: expected a tensor, an array, an image of PIL, or a list of these. What a service "
            f"has made into an image of its own goes into log()."
        )


def _of_tensor(name: str, tensor: torch.Tensor, layout: str | None, usual: str, found: str) -> list[torch.Tensor]:
    order = layout or ("HW" if tensor.dim() == 2 else usual)
    if not _fits(tensor.shape, order):
        fitting = [
            each for each in FORMATS if len(each) == tensor.dim() and _fits(tensor.shape, each.removeprefix("N"))
        ]
        hint = f"Write dataformats={' or '.join(map(repr, fitting))} if that is the order." if fitting else ""
        raise ValueError(
            f"log_images(): {name!r} is {found}, read as ({', '.join(_NAMES[each] for each in order)}), or several of these: expected at "
            f"least one pixel, and 1, 3 or 4 channels. {hint}".rstrip()
        )
    _check_dtype(name, tensor.dtype in {torch.bool, torch.uint8} or tensor.dtype.is_floating_point, tensor.dtype)
    batch = tensor if tensor.dim() > len(order) else tensor.unsqueeze(0)
    channels = batch.unsqueeze(-1) if order == "HW" else batch.movedim(order.index("C") + 1, -1)
    return list(_as_bytes(name, channels).to("cpu").clone(memory_format=torch.contiguous_format))


def _fits(shape: torch.Size, order: str) -> bool:
    if len(shape) not in {len(order), len(order) + 1}:
        return False
    sizes = dict(zip(reversed(order), reversed(shape), strict=False))
    return sizes["H"] > 0 and sizes["W"] > 0 and sizes.get("C", 1) in _CHANNELS


def _as_bytes(name: str, images: torch.Tensor) -> torch.Tensor:
    if images.dtype == torch.bool:
        return images.to(torch.uint8) * 255
    if images.dtype == torch.uint8:
        return images
    exact = images.to(torch.float32)
    finite = exact.nan_to_num(0.0, 0.0, 0.0)
    if finite.numel():
        _check_range(name, finite)
    return (exact.nan_to_num(0.0, 1.0, 0.0).clamp(0.0, 1.0) * 255).round().to(torch.uint8)


def _check_range(name: str, values: torch.Tensor) -> None:
    least, greatest = torch.stack(torch.aminmax(values)).tolist()
    if least >= -_ROUNDING and greatest <= 1 + _ROUNDING:
        return
    if greatest > _BRIGHTEST:
        hint = "Divide them by 255, or make them uint8."
    elif least < -_ROUNDING:
        hint = (
            "Give (value + 1) / 2 if they go from -1 to 1, and value.clamp(0, 1) if what lies outside may be cut off."
        )
    else:
        hint = "Give value.clamp(0, 1) if what lies above may be cut off, and value / value.max() if it may not."
    raise ValueError(
        f"log_images(): {name!r} has floats from {least:g} to {greatest:g}: floats are read as 0…1. {hint}"
    )


def _array(name: str, value: Any) -> Any:
    try:
        return as_array(value)
    except Exception as error:
        raise ValueError(f"log_images(): {name!r} is {describe(value)} that cannot be read: {said(error)}.") from error


def _check_dtype(name: str, has_fitting: bool, dtype: object) -> None:
    if not has_fitting:
        raise ValueError(
            f"log_images(): {name!r} has the dtype {dtype}: expected floats from 0 to 1, or uint8 from 0 to 255. Convert it first."
        )


def _from_array(array: Any) -> torch.Tensor:
    return torch.from_numpy(array.copy(order="C"))


def _is_picture(value: Any) -> bool:
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(value, pil.Image)


def _of_picture(name: str, image: Any) -> torch.Tensor:
    """Pixels of an image of PIL. Palettes and other colour spaces become colours; depths above 8 bits have no fixed range."""
    if image.mode in {"I", "F"} or ";" in image.mode:
        raise ValueError(
            f"log_images(): {name!r} is an image of PIL in the mode {image.mode!r}, which says nothing about which value is white. Give it as "
            f"an array of floats from 0 to 1."
        )
    if image.width == 0 or image.height == 0:
        raise ValueError(
            f"log_images(): {name!r} is an image of PIL of {image.width} by {image.height} pixels: expected at least one."
        )
    has_opacity = image.mode in {"RGBA", "LA", "PA", "RGBa"} or "transparency" in image.info
    mode = "L" if image.mode in {"1", "L"} and not has_opacity else "RGBA" if has_opacity else "RGB"
    pixels = torch.frombuffer(bytearray(image.convert(mode).tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, len(mode))
