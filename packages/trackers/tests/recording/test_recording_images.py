"""Images of any kind become (height, width, channels) in uint8, as copies on the CPU; what is no image is refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from accel_trackers.recording.images import FORMATS, as_images

HEIGHT, WIDTH = 2, 5
BYTES = (torch.arange(3 * HEIGHT * WIDTH, dtype=torch.uint8) * 7).view(HEIGHT, WIDTH, 3)  # (H, W, C)
ARRAY = BYTES.numpy()


def only(value: Any, dataformats: str | None = None) -> torch.Tensor:
    """The image that comes of one image."""
    (image,) = as_images({"x": value}, dataformats)["x"]
    return image


def ordered(dataformats: str) -> torch.Tensor:
    """Two images, or one: BYTES, or its first channel, in that order."""
    order = dataformats.removeprefix("N")
    one = BYTES[..., 0] if order == "HW" else BYTES.permute(*("HWC".index(each) for each in order))
    return torch.stack([one, one]) if dataformats.startswith("N") else one


def is_as_trackers_get_it(image: torch.Tensor) -> bool:
    return image.dtype == torch.uint8 and image.is_cpu and image.is_contiguous() and image.dim() == 3


@pytest.mark.parametrize("dataformats", FORMATS)
@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_the_order_of_dimensions_may_be_said(dataformats: str, kind: str) -> None:
    value = ordered(dataformats) if kind == "tensor" else ordered(dataformats).numpy()
    images = as_images({"x": value}, dataformats)["x"]
    expected = BYTES[..., :1] if "C" not in dataformats else BYTES
    assert len(images) == (2 if "N" in dataformats else 1)
    assert all(is_as_trackers_get_it(image) and torch.equal(image, expected) for image in images)


@pytest.mark.parametrize(("dataformats", "said"), [("CHW", "NCHW"), ("NCHW", "CHW"), ("HW", "NHW"), ("NHWC", "HWC")])
def test_the_n_says_nothing_that_the_shape_does_not(dataformats: str, said: str) -> None:
    assert len(as_images({"x": ordered(dataformats)}, said)["x"]) == (2 if "N" in dataformats else 1)


@pytest.mark.parametrize("dataformats", ["HW", "CHW", "NCHW"])
def test_tensors_have_their_channels_first(dataformats: str) -> None:
    expected = BYTES[..., :1] if dataformats == "HW" else BYTES
    assert torch.equal(as_images({"x": ordered(dataformats)})["x"][-1], expected)


@pytest.mark.parametrize("dataformats", ["HW", "HWC", "NHWC"])
def test_arrays_have_their_channels_last(dataformats: str) -> None:
    expected = BYTES[..., :1] if dataformats == "HW" else BYTES
    assert torch.equal(as_images({"x": ordered(dataformats).numpy()})["x"][-1], expected)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_an_image_has_one_three_or_four_channels(channels: int) -> None:
    assert only(torch.zeros(channels, HEIGHT, WIDTH)).shape == (HEIGHT, WIDTH, channels)


def test_a_list_mixes_kinds_and_sizes() -> None:
    pil = pytest.importorskip("PIL.Image")
    values = [BYTES.permute(2, 0, 1), ARRAY, pil.fromarray(ARRAY), (torch.zeros(4, 4), torch.zeros(2, 1, 3, 3))]
    images = as_images({"x": values, "y": torch.ones(2, 2)})
    assert [tuple(image.shape) for image in images["x"]] == [(2, 5, 3)] * 3 + [(4, 4, 1)] + [(3, 3, 1)] * 2
    assert all(torch.equal(image, BYTES) for image in images["x"][:3])
    assert [*images] == ["x", "y"]


def test_a_name_without_any_image_is_left_out() -> None:
    assert as_images({"none": [], "empty": torch.zeros(0, 3, 4, 4), "one": torch.zeros(2, 2)}).keys() == {"one"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_floats_go_from_0_to_1_but_for_rounding(dtype: torch.dtype) -> None:
    values = torch.tensor([[0.0, 0.5, 1.0, -0.004, 1.0079, math.nan, math.inf, -math.inf]], dtype=dtype)
    assert only(values)[0, :, 0].tolist() == [0, 128, 255, 0, 255, 0, 255, 0]


def test_a_batch_without_images_and_one_without_finite_values_have_no_range() -> None:
    assert as_images({"none": torch.zeros(0, 3, 2, 2)}) == {}
    assert only(torch.full((1, 2), math.nan)).flatten().tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.longdouble, ">f4"])
def test_arrays_of_all_floats_are_read(dtype: Any) -> None:
    assert only(np.array([[0, 0.25, 1]], dtype=dtype))[0, :, 0].tolist() == [0, 64, 255]


@pytest.mark.parametrize("make", [torch.tensor, np.array])
def test_false_is_black_and_true_white(make: Any) -> None:
    assert only(make([[False, True]]))[0, :, 0].tolist() == [0, 255]


@pytest.mark.parametrize("value", [BYTES.clone(), ARRAY.copy()], ids=["tensor", "array"])
@pytest.mark.parametrize("several", [False, True])
def test_images_are_copies(value: Any, several: bool) -> None:
    given = value[None] if several else value
    image = only(given, "HWC")
    before = image.clone()
    value[...] = 0
    assert torch.equal(image, before)
    assert not torch.equal(image, torch.zeros_like(image))
    value[...] = BYTES.numpy() if isinstance(value, np.ndarray) else BYTES


def test_gradients_and_strides_do_not_matter() -> None:
    values = torch.rand(3, WIDTH, HEIGHT, requires_grad=True)
    expected = (values.detach().permute(2, 1, 0) * 255).round().to(torch.uint8)
    assert torch.equal(only(values.transpose(1, 2)), expected)
    read_only = ARRAY[::-1, ::-1]
    read_only.flags.writeable = False
    assert torch.equal(only(read_only), BYTES.flip(0, 1))


def test_images_are_made_on_the_cpu_also_where_new_tensors_are_made_elsewhere() -> None:
    pil = pytest.importorskip("PIL.Image")
    with torch.device("meta"):
        assert all(torch.equal(only(each), BYTES) for each in (ARRAY, pil.fromarray(ARRAY), BYTES.permute(2, 0, 1)))


@pytest.mark.parametrize(
    ("mode", "channels", "first"),
    [
        ("L", 1, [200]), ("1", 1, [255]), ("RGB", 3, [10, 20, 30]), ("RGBA", 4, [10, 20, 30, 40]), ("LA", 4, [200, 200, 200, 40]),
        ("P", 3, None), ("CMYK", 3, None), ("YCbCr", 3, None),
    ],
)  # fmt: skip
def test_pictures_of_pil_are_read_in_all_modes_that_show_something(
    mode: str, channels: int, first: list[int] | None
) -> None:
    pil = pytest.importorskip("PIL.Image")
    colours = {"L": 200, "1": 1, "RGB": (10, 20, 30), "RGBA": (10, 20, 30, 40), "LA": (200, 40)}
    image = only(pil.new(mode, (WIDTH, HEIGHT), colours.get(mode, 0)))
    assert is_as_trackers_get_it(image)
    assert image.shape == (HEIGHT, WIDTH, channels)
    assert first is None or image[0, 0].tolist() == first


def test_a_palette_with_a_transparent_colour_keeps_it() -> None:
    pil = pytest.importorskip("PIL.Image")
    picture = pil.new("P", (1, 1))
    picture.putpalette([1, 2, 3])
    picture.info["transparency"] = 0
    assert only(picture).tolist() == [[[1, 2, 3, 0]]]


class Lost:
    """What numpy could make an array of, if its device were still there."""

    shape = (2, 2, 3)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("device lost")


@pytest.mark.parametrize(
    ("value", "dataformats", "message"),
    [
        (torch.zeros(64, 32, 3), None, r"log_images\(\): 'x' \(torch.Tensor of shape \(64, 32, 3\)\): it is read as CHW or NCHW: expected"),
        (torch.zeros(64, 32, 3), None, "at least one pixel, and 1, 3 or 4 channels. Another order is given by dataformats=: HW, CHW, HWC"),
        (np.zeros((3, 64, 32)), None, r"numpy.ndarray of shape \(3, 64, 32\).* read as HWC.*channels"),
        (torch.zeros(8, 28, 28), None, "read as CHW"),
        (torch.zeros(5), None, r"of shape \(5,\).*4 channels"),
        (torch.zeros(2, 2, 2, 2, 2), None, "of shape .*4 channels"),
        (torch.zeros(3, 0, 4), None, r"of shape \(3, 0, 4\).*at least one pixel"),
        (torch.zeros(3, 4, 5), "HWC", r"read as HWC"),
        (torch.zeros(2, 2, dtype=torch.int64), None, "the dtype is torch.int64: expected floats from 0 to 1, or uint8 from 0 to 255"),
        (np.zeros((2, 2), dtype="int32"), None, "the dtype is torch.int32: expected floats"),
        (np.zeros((2, 2), dtype="complex64"), None, "the dtype is torch.complex64: expected floats"),
        (torch.tensor([[-1.0, math.nan, 255.0, math.inf]]), None, r"floats from -1 to 255, which are read as 0…1: scale or clamp\(0, 1\) them"),
        (torch.linspace(-1, 1, 12).reshape(1, 3, 4), None, "floats from -1 to 1, which"),
        (np.array([[-2.1, 2.6]]), None, "from -2.1 to 2.6, "),
        (torch.tensor([[0.0, 1.5]]), None, r"from 0 to 1.5"),
        (torch.tensor([[-0.02, 1.0]]), None, r"from -0.02 to 1"),
        (torch.empty(3, 4, 4, device="meta"), None, r"'x' \(torch.Tensor of shape \(3, 4, 4\)\): .*meta"),
        (Lost(), None, r"'x' \(.*Lost of shape \(2, 2, 3\)\): device lost$"),
        ("x.png", None, r"log_images\(\): 'x' \(str\): expected a tensor, an array, an image of PIL, or a list of these"),
        ([[0.5, 0.5]], None, r"'x' \(list\): expected a tensor"),
        (None, None, r"'x' \(NoneType\): expected a tensor"),
        (torch.zeros(2, 2), "WH", r"log_images\(dataformats='WH'\): expected one of HW, CHW, HWC, NHW, NCHW, NHWC, or None"),
    ],
)  # fmt: skip
def test_what_is_no_image_is_refused_by_name(value: Any, dataformats: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_images({"good": torch.zeros(3, 3, 3), "x": value}, dataformats)


@pytest.mark.parametrize("mode", ["I;16", "F", "I"])
def test_pictures_without_a_white_are_refused(mode: str) -> None:
    pil = pytest.importorskip("PIL.Image")
    with pytest.raises(ValueError, match=f"the mode '{mode}' does not say which value is white. Give floats"):
        as_images({"x": pil.new(mode, (1, 1))}, None)


class Elsewhere(torch.Tensor):
    """Stands for a tensor that lies on several ranks."""

    @property
    def placements(self) -> list[Any]:
        return [self]

    def is_replicate(self) -> bool:
        return False

    def to_local(self) -> torch.Tensor:
        return self


def test_an_image_on_several_ranks_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"log_images\(\): 'x' \(.*Elsewhere of shape \(2, 2\)(?s:.*)on several ranks",
    ):
        as_images({"x": torch.zeros(2, 2).as_subclass(Elsewhere)})
