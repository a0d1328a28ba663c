"""Options of fp8: what they choose, and what is said about those that cannot be meant."""

import re
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from accel_core import Accelerator, NotInstalledError
from accel_core.api.component import how_to_install
from accel_precision import FP8, AORecipeKwargs, FP8RecipeKwargs, TERecipeKwargs
from accel_precision.fp8.capability import FP8_PRODUCTS, MXFP8_PRODUCTS, Found, emulates
from accel_precision.fp8.component import choose_backend
from accel_precision.fp8.transformer_engine_backend import check_device, scaling

TORCHAO, TE = "torchao", "transformer_engine"


@pytest.mark.parametrize(
    ("asked", "recipe", "installed", "chosen"),
    [
        (None, None, {TORCHAO, TE}, TORCHAO),
        (None, None, {TE}, TE),
        (TE, None, {TORCHAO, TE}, TE),
        (None, AORecipeKwargs(), {TORCHAO, TE}, TORCHAO),
        (None, TERecipeKwargs(), {TORCHAO, TE}, TE),
        (None, FP8RecipeKwargs(), {TORCHAO, TE}, TORCHAO),
        (None, FP8RecipeKwargs(margin=2), {TORCHAO, TE}, TE),
        (None, FP8RecipeKwargs(backend="TE"), {TORCHAO, TE}, TE),
        (None, FP8RecipeKwargs(backend="AO"), {TORCHAO, TE}, TORCHAO),
    ],
)
def test_the_back_end_is_the_one_asked_for_else_the_recipes_else_torchao(asked, recipe, installed, chosen):
    assert choose_backend(asked, recipe, installed.__contains__) == chosen


@pytest.mark.parametrize(
    ("asked", "recipe", "extra"),
    [(None, None, "torchao"), (TORCHAO, None, "torchao"), (None, TERecipeKwargs(), "transformer-engine")],
)
def test_a_back_end_that_is_missing_says_what_to_install(asked, recipe, extra):
    with pytest.raises(NotInstalledError, match=re.escape(how_to_install(f"accel-precision[{extra}]"))):
        choose_backend(asked, recipe, lambda _: False)


@pytest.mark.skipif(find_spec(TE) is not None, reason="Transformer Engine is installed")
def test_a_missing_transformer_engine_is_named_when_the_precision_is_made():
    with pytest.raises(NotInstalledError, match="'transformer_engine', which is not installed"):
        FP8(backend=TE)


@pytest.mark.skipif(
    find_spec(TE) is None, reason="needs Transformer Engine, which only installs beside an NVIDIA device"
)
def test_transformer_engine_trains_with_the_users_parameters():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 16))
    parameters, names = dict(model.named_parameters()), list(model.state_dict())
    accelerator = Accelerator(mixed_precision=FP8(backend=TE))
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(16, 16, device=accelerator.device)
    before = prepared[2].weight.detach().clone()
    accelerator.backward(prepared(x).square().mean())
    optimizer.step()
    assert type(prepared[2]).__module__.startswith("transformer_engine")
    assert all(parameters[name] is each for name, each in prepared.named_parameters())
    assert list(prepared.state_dict()) == names
    assert not torch.equal(before, prepared[2].weight)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (TERecipeKwargs(), ("DelayedScaling", {"amax_compute_algo": "most_recent"})),
        (
            TERecipeKwargs(margin=1, amax_history_len=16, amax_compute_algo="max", fp8_format="E4M3"),
            (
                "DelayedScaling",
                {"margin": 1, "amax_history_len": 16, "amax_compute_algo": "max", "fp8_format": "E4M3"},
            ),
        ),
        (
            TERecipeKwargs(override_linear_precision=(False, False, True)),
            ("DelayedScaling", {"amax_compute_algo": "most_recent", "override_linear_precision": (False, False, True)}),
        ),
        (TERecipeKwargs(use_mxfp8_block_scaling=True), ("MXFP8BlockScaling", {})),
    ],
)
def test_options_become_a_recipe_of_transformer_engine(recipe, expected):
    assert scaling(recipe) == expected


def test_the_older_options_become_those_of_their_back_end():
    older = FP8RecipeKwargs(margin=2, skip=["head"])
    assert older.recipe_for(TE) == TERecipeKwargs(margin=2, skip=["head"])
    assert FP8(recipe=FP8RecipeKwargs(skip=["head"])).recipe == AORecipeKwargs(skip=["head"])


CUDA, HIP = Found("cuda", (8, 6)), Found("cuda", architecture="gfx90a:sramecc+")


@pytest.mark.parametrize(
    ("asked", "found", "need", "emulated"),
    [
        (None, Found("cpu"), FP8_PRODUCTS, True),
        (False, Found("cpu"), FP8_PRODUCTS, False),
        (True, CUDA, FP8_PRODUCTS, True),
        (None, Found("cuda", (8, 9)), FP8_PRODUCTS, False),
        (None, Found("cuda", (9, 0)), FP8_PRODUCTS, False),
        (None, Found("cuda", architecture="gfx942:sramecc+"), FP8_PRODUCTS, False),
        (False, Found("xpu"), FP8_PRODUCTS, False),
        (None, Found("cuda", (10, 0)), MXFP8_PRODUCTS, False),
        (True, HIP, MXFP8_PRODUCTS, True),
    ],
)
def test_products_are_emulated_on_request_and_on_a_cpu(asked, found, need, emulated):
    assert emulates(asked, found, need, {}) is emulated


@pytest.mark.parametrize(
    ("asked", "found", "need", "named"),
    [
        (None, CUDA, FP8_PRODUCTS, "cuda device of compute capability 8.6; they need compute capability 8.9"),
        (False, CUDA, FP8_PRODUCTS, "compute capability 8.6"),
        (None, HIP, FP8_PRODUCTS, "architecture gfx90a.* or AMD's gfx942"),
        (None, Found("xpu"), FP8_PRODUCTS, "this is a xpu device"),
        (None, Found("cuda", (9, 0)), MXFP8_PRODUCTS, "products in mxfp8 .* need compute capability 10.0 or more. Use"),
        (None, Found("cuda", architecture="gfx942"), MXFP8_PRODUCTS, "architecture gfx942"),
    ],
)
def test_hardware_that_is_not_capable_is_refused_with_a_remedy(asked, found, need, named):
    with pytest.raises(ValueError, match=f"(?is){named}.*mixed_precision='bf16' without fp8"):
        emulates(asked, found, need, {"without fp8": "mixed_precision='bf16'"})


@pytest.mark.parametrize(
    ("found", "recipe", "named"),
    [
        (Found("cpu"), TERecipeKwargs(), "Matrix products in fp8 by Transformer Engine .* this is a cpu device"),
        (CUDA, TERecipeKwargs(), "compute capability 8.6; it runs on .* 8.9 or more. Use FP8.backend='torchao'."),
        (HIP, TERecipeKwargs(), "architecture gfx90a"),
        (Found("cuda", (9, 0)), TERecipeKwargs(use_mxfp8_block_scaling=True), "capability 9.0; .* 10.0 or more"),
    ],
)
def test_transformer_engine_refuses_devices_that_it_does_not_run_on(found, recipe, named):
    with pytest.raises(ValueError, match=f"(?s){named}"):
        check_device(found, recipe)
    check_device(Found("cuda", (10, 0)), recipe)


class Config:
    """No configuration of torchao."""


def torchao_config():
    from torchao.float8 import Float8LinearConfig

    return Float8LinearConfig()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: FP8("colwise"), ValueError, "recipe='colwise'.: expected one of 'tensorwise', 'rowwise'"),
        (lambda: FP8(recipe=3), TypeError, "is a int, expected the name of a recipe"),
        (lambda: FP8(backend="MSAMP"), ValueError, "backend='MSAMP'.: expected one of 'torchao'"),
        (lambda: FP8(backend="torchao", recipe=TERecipeKwargs()), ValueError, "options of 'transformer_engine'"),
        (lambda: FP8("rowwise", backend=TE), ValueError, "was given recipe='rowwise', which are options of 'torchao'"),
        (lambda: FP8(backend=TE, emulate=True), ValueError, "was given emulate, which are options of 'torchao'"),
        (lambda: FP8(recipe=AORecipeKwargs(), emulate=True), ValueError, "emulate too, and the object is complete"),
        (lambda: FP8(AORecipeKwargs(), emulate=False), ValueError, "was given emulate too, and the object is complete"),
        (
            lambda: FP8(AORecipeKwargs(skip=["a"], convert_ends=True), skip=[], convert_ends=False),
            ValueError,
            r"was given skip, convert_ends too, and the object is complete.*AORecipeKwargs\(skip=",
        ),
        (lambda: FP8(backend=TE, emulate=False), ValueError, "was given emulate, which are options of 'torchao'"),
        (
            lambda: FP8(backend=TE, enable_fsdp_float8_all_gather=False),
            ValueError,
            "was given enable_fsdp_float8_all_gather, which are options of 'torchao'",
        ),
        (lambda: FP8(skip="head"), TypeError, "skip='head' is a str"),
        (lambda: FP8(module_filter_func="head"), TypeError, "module_filter_func is a str"),
        (
            lambda: FP8(convert_ends=True, module_filter_func=lambda *_: True),
            ValueError,
            "decides about the first and the last",
        ),
        (
            lambda: FP8("rowwise", enable_fsdp_float8_all_gather=True),
            ValueError,
            "gathered in fp8 have one scale per tensor",
        ),
        (lambda: AORecipeKwargs(config=Config()), TypeError, "was given a Config, expected a torchao"),
        (
            lambda: AORecipeKwargs(config=torchao_config(), recipe="rowwise"),
            ValueError,
            "config= and recipe, and a Float8LinearConfig says both",
        ),
        (lambda: FP8RecipeKwargs(opt_level="O2"), ValueError, "asks for MS-AMP.*AORecipeKwargs"),
        (lambda: FP8RecipeKwargs(backend="MSAMP"), ValueError, "asks for MS-AMP.*TERecipeKwargs"),
        (lambda: FP8RecipeKwargs(backend="torch"), ValueError, "expected one of 'AO', 'TE', None"),
        (
            lambda: FP8RecipeKwargs(backend="AO", margin=1),
            ValueError,
            "was given margin, which only Transformer Engine",
        ),
        (lambda: TERecipeKwargs(fp8_format="E5M2"), ValueError, "expected one of 'HYBRID', 'E4M3'"),
        (lambda: TERecipeKwargs(amax_compute_algo="mean"), ValueError, "expected one of 'max', 'most_recent'"),
        (lambda: TERecipeKwargs(interval=4), ValueError, "computes scales at every step"),
        (lambda: TERecipeKwargs(amax_history_len=0), ValueError, "expected at least 1"),
        (lambda: TERecipeKwargs(override_linear_precision=(True,)), ValueError, "expected three flags"),
        (
            lambda: TERecipeKwargs(use_mxfp8_block_scaling=True, margin=1),
            ValueError,
            "margin, which only delayed scaling has",
        ),
    ],
)
def test_options_that_cannot_be_meant_are_refused_when_they_are_given(make, error, message):
    with pytest.raises(error, match=f"(?s){message}"):
        make()


class Doubling(nn.Linear):
    """Computes in its own way."""


def with_own_forward():
    layer = nn.Linear(16, 16)
    layer.forward = lambda x: x
    return layer


@pytest.mark.parametrize(
    ("options", "layers", "message"),
    [
        ({}, [nn.Linear(16, 16)], "no layer of Sequential can be converted: 0 .the first linear layer.*'bf16'"),
        ({}, [nn.ReLU()], "it has no nn.Linear"),
        ({"convert_ends": True}, [nn.Linear(17, 16)], "0 .16 x 17: 17 not divisible by 16"),
        ({"convert_ends": True}, [Doubling(16, 16)], "0 .a Doubling, which computes in its own way"),
        ({"convert_ends": True}, [with_own_forward()], "its forward was replaced on the object"),
        (
            {"module_filter_func": lambda *_: True},
            [nn.Linear(16, 16), nn.Linear(16, 17)],
            "chose 1 layers of Sequential that fp8 cannot compute: 1 .17 x 16: 17 not divisible by 16.*return False",
        ),
        ({"skip": ["hed"]}, [nn.Linear(16, 16)] * 3, "skip=.'hed'. has 'hed', which no linear layer of Sequential"),
        (
            {"enable_fsdp_float8_all_gather": True},
            [nn.Linear(16, 16) for _ in range(3)],
            "holds whole parameters on every rank.*strategy='fsdp'",
        ),
    ],
)
def test_models_that_do_not_fit_are_refused_and_left_as_they_were(options, layers, message):
    model = nn.Sequential(*layers)
    before = [type(layer) for layer in model]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        Accelerator(cpu=True, mixed_precision=FP8(**options)).prepare(model)
    assert [type(layer) for layer in model] == before


def test_a_pattern_that_an_earlier_model_matched_may_match_nothing_in_a_later_one():
    precision = FP8(skip=["0"])
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    accelerator.prepare(nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)]))
    accelerator.prepare(nn.ModuleDict({name: nn.Linear(16, 16) for name in "abc"}))
    assert precision.converted == {"Sequential": ("1",), "ModuleDict": ("b",)}
