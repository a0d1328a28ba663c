"""Images of any kind, made into one: (height, width, channels), uint8, on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from accel_trackers.recording.values import as_array, clean, describe, is_array, local

FORMATS = ("HW", "CHW", "HWC", "NHW", "NCHW", "NHWC")
"""How the dimensions of images are ordered: number, height, width, channels."""

_ROUNDING = 0.01  # by which floats may overstep 0…1: more than bfloat16 does, less than one sees


def as_images(values: Mapping[str, Any], dataformats: str | None = None) -> dict[str, list[torch.Tensor]]:
    """Images by name: each (height, width, channels) with 1, 3 or 4 channels, uint8, on the CPU.

    Copies, taken now; images on a device are waited for. See `Accelerator.log_images` for what an
    image is; nan and -inf are 0, inf is 1. ValueError for other values.
    """
    if dataformats not in {None, *FORMATS}:
        raise ValueError(f"log_images(dataformats={dataformats!r}): expected one of {', '.join(FORMATS)}, or None.")
    images: dict[str, list[torch.Tensor]] = {}
    for name, value in values.items():
        try:
            images[clean(str(name))] = list(_images(value, (dataformats or "").removeprefix("N")))
        except Exception as error:
            raise ValueError(f"log_images(): {name!r} ({describe(value)}): {error}") from error
    return {name: each for name, each in images.items() if each}


def _images(value: Any, order: str) -> Iterator[torch.Tensor]:
    pil = sys.modules.get("PIL.Image")
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _images(each, order)
    elif isinstance(value, torch.Tensor):
        yield from _of_tensor(local(value), order or ("HW" if value.dim() == 2 else "CHW"))
    elif pil is not None and isinstance(value, pil.Image):
        yield from _of_tensor(_of_picture(value), "HWC")
    elif is_array(value):
        array = as_array(value)
        if array.dtype.kind == "f":
            array = array.astype("float32")  # torch lacks some of the others
        yield from _of_tensor(torch.from_numpy(array.copy(order="C")), order or ("HW" if array.ndim == 2 else "HWC"))
    else:
        raise ValueError("expected a tensor, an array, an image of PIL, or a list of these")


def _of_tensor(tensor: torch.Tensor, order: str) -> list[torch.Tensor]:
    batch = tensor if tensor.dim() > len(order) else tensor.unsqueeze(0)
    images = batch.unsqueeze(-1) if order == "HW" else batch.movedim(order.index("C") + 1, -1)
    if images.dim() != 4 or images.shape[-1] not in {1, 3, 4} or 0 in images.shape[1:]:
        what = f"it is read as {order} or N{order}: expected at least one pixel, and 1, 3 or 4 channels"
        raise ValueError(f"{what}. Another order is given by dataformats=: {', '.join(FORMATS)}")
    return list(_as_bytes(images).to("cpu").clone(memory_format=torch.contiguous_format))


def _as_bytes(images: torch.Tensor) -> torch.Tensor:
    if images.dtype == torch.bool:
        return images.to(torch.uint8) * 255
    if images.dtype == torch.uint8:
        return images
    if not images.dtype.is_floating_point:
        raise ValueError(f"the dtype is {images.dtype}: expected floats from 0 to 1, or uint8 from 0 to 255")
    exact = images.to(torch.float32)
    if exact.numel():
        least, greatest = torch.stack(torch.aminmax(exact.nan_to_num(0.0, 0.0, 0.0))).tolist()
        if least < -_ROUNDING or greatest > 1 + _ROUNDING:
            raise ValueError(f"floats from {least:g} to {greatest:g}, which are read as 0…1: scale or clamp(0, 1) them")
    return (exact.nan_to_num(0.0, 1.0, 0.0).clamp(0.0, 1.0) * 255).round().to(torch.uint8)


def _of_picture(image: Any) -> torch.Tensor:
    """Pixels of an image of PIL, in grey or colours. ValueError for depths above 8 bits."""
    if image.mode in {"I", "F"} or ";" in image.mode:
        raise ValueError(f"the mode {image.mode!r} does not say which value is white. Give floats from 0 to 1.")
    has_opacity = image.mode in {"RGBA", "LA", "PA", "RGBa"} or "transparency" in image.info
    mode = "RGBA" if has_opacity else "L" if image.mode in {"1", "L"} else "RGB"
    pixels = torch.frombuffer(bytearray(image.convert(mode).tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, len(mode))
