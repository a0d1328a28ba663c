"""Images of any kind, made into one: (height, width, channels), uint8, on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from accel_trackers.recording.values import as_array, describe, is_array, local

FORMATS = ("HW", "CHW", "HWC", "NHW", "NCHW", "NHWC")
"""How the dimensions of images are ordered: number, height, width, channels."""

_CHANNELS = (1, 3, 4)  # grey; red, green and blue; the same with opacity
_ROUNDING = 0.01  # by which floats may overstep 0…1: more than bfloat16 does, less than one sees


def as_images(values: Mapping[str, Any], dataformats: str | None = None) -> dict[str, list[torch.Tensor]]:
    """Images by name: each (height, width, channels) with 1, 3 or 4 channels, uint8, on the CPU.

    Copies, taken now; images on a device are waited for. A value is an image, a batch, or a list
    of these: tensors (C, H, W), (N, C, H, W), (H, W), arrays (H, W, C), (N, H, W, C), (H, W), or
    images of PIL; `dataformats`, one of `FORMATS`, is another order. Floats go from 0 to 1, but for
    rounding; nan and -inf are 0, inf is 1. False is black, True white. ValueError for other values.
    """
    if dataformats is not None and dataformats not in FORMATS:
        raise ValueError(f"log_images(dataformats={dataformats!r}): expected one of {', '.join(FORMATS)}, or None.")
    order = None if dataformats is None else dataformats.removeprefix("N")
    images: dict[str, list[torch.Tensor]] = {}
    for name, value in values.items():
        try:
            images[name] = list(_images(value, order))
        except Exception as error:
            raise ValueError(f"log_images(): {name!r} is {describe(value)}: {error}") from error
    return {name: each for name, each in images.items() if each}


def _images(value: Any, order: str | None) -> Iterator[torch.Tensor]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _images(each, order)
    elif isinstance(value, torch.Tensor):
        yield from _of_tensor(local(value), order, "CHW")
    elif (pil := sys.modules.get("PIL.Image")) is not None and isinstance(value, pil.Image):
        yield from _of_tensor(_of_picture(value), None, "HWC")
    elif is_array(value):
        array = as_array(value)
        if array.dtype.kind == "f":
            array = array.astype("float32")  # torch lacks some of the others
        yield from _of_tensor(torch.from_numpy(array.copy(order="C")), order, "HWC")
    else:
        raise ValueError(
            "expected a tensor, an array, an image of PIL, or a list of these. A service's own image goes into log()."
        )


def _of_tensor(tensor: torch.Tensor, order: str | None, usual: str) -> list[torch.Tensor]:
    order = order or ("HW" if tensor.dim() == 2 else usual)
    if not _fits(tensor.shape, order):
        raise ValueError(
            f"the shape {tuple(tensor.shape)} is read as {order}, or several of these: expected at least one pixel, and 1, 3 or 4 "
            f"channels. Another order is said by dataformats=: {', '.join(FORMATS)}."
        )
    batch = tensor if tensor.dim() > len(order) else tensor.unsqueeze(0)
    channels = batch.unsqueeze(-1) if order == "HW" else batch.movedim(order.index("C") + 1, -1)
    return list(_as_bytes(channels).to("cpu").clone(memory_format=torch.contiguous_format))


def _fits(shape: torch.Size, order: str) -> bool:
    if len(shape) not in {len(order), len(order) + 1}:
        return False
    sizes = dict(zip(reversed(order), reversed(shape), strict=False))
    return sizes["H"] > 0 and sizes["W"] > 0 and sizes.get("C", 1) in _CHANNELS


def _as_bytes(images: torch.Tensor) -> torch.Tensor:
    if images.dtype == torch.bool:
        return images.to(torch.uint8) * 255
    if images.dtype == torch.uint8:
        return images
    if not images.dtype.is_floating_point:
        raise ValueError(f"the dtype is {images.dtype}: expected floats from 0 to 1, or uint8 from 0 to 255.")
    exact = images.to(torch.float32)
    finite = exact.nan_to_num(0.0, 0.0, 0.0)
    least, greatest = torch.stack(torch.aminmax(finite)).tolist() if finite.numel() else (0.0, 0.0)
    if least < -_ROUNDING or greatest > 1 + _ROUNDING:
        raise ValueError(
            f"it has floats from {least:g} to {greatest:g}, and floats are read as 0…1: scale them, as by value / 255 or (value + 1) / 2, or "
            f"cut them off by value.clamp(0, 1)."
        )
    return (exact.nan_to_num(0.0, 1.0, 0.0).clamp(0.0, 1.0) * 255).round().to(torch.uint8)


def _of_picture(image: Any) -> torch.Tensor:
    """Pixels of an image of PIL, in grey or colours. ValueError for depths above 8 bits."""
    if image.mode in {"I", "F"} or ";" in image.mode:
        raise ValueError(f"the mode {image.mode!r} does not say which value is white. Give floats from 0 to 1.")
    has_opacity = image.mode in {"RGBA", "LA", "PA", "RGBa"} or "transparency" in image.info
    mode = "L" if image.mode in {"1", "L"} and not has_opacity else "RGBA" if has_opacity else "RGB"
    pixels = torch.frombuffer(bytearray(image.convert(mode).tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, len(mode))
