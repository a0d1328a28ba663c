"""Estimates of memory: their arithmetic, what they are made from, and the command that prints them."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from accel_big_model import StrategyEstimate, estimate_memory, init_empty_weights
from accel_big_model.estimate.activations import ActivationsUnknownError, trace
from accel_big_model.estimate.command import main, size
from accel_big_model.estimate.optimizers import cost_of
from accel_big_model.estimate.precisions import read_precision
from accel_big_model.estimate.shapes import ROOT, shape_of_files, shape_of_model
from accel_big_model.estimate.tracking import LiveBytes
from accel_core import CheckpointError

FP32 = read_precision("fp32")
WIDTH = 64
LAYER = (WIDTH * WIDTH + WIDTH) * 4  # bytes of one in fp32
STEPS = 4  # bytes of Adam's count of steps, a tensor for each parameter


class Tower(nn.Module):
    def __init__(self, layers=4, width=WIDTH):
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 10, bias=False)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, ids):
        x = self.embed(ids) * self.scale[0]
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


def tower(layers=4, width=WIDTH):
    return Tower(layers, width)


def ids():
    return torch.zeros(2, 8, dtype=torch.int64)


def stack(layers=4):
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def row(model, strategy, dtype="fp32", **options) -> StrategyEstimate:
    return estimate_memory(model, dtypes=[dtype], strategies=[strategy], world_size=2, **options).row(strategy, dtype)


class TestShapes:
    def test_parameters_have_units_and_ties_count_once(self):
        model = Tower()
        model.head.weight = model.embed.weight
        model.blocks[1].requires_grad_(requires_grad=False)
        shape = shape_of_model(model)
        assert shape.numel == sum(each.numel() for each in model.parameters())
        assert {each.name for each in shape.parameters} == {name for name, _ in model.named_parameters()}
        units = {each.name: each.unit for each in shape.parameters}
        assert units["embed.weight"] == ROOT
        assert units["blocks.2.bias"] == "blocks.2"
        assert {each.name for each in shape.parameters if not each.trained} == {"blocks.1.weight", "blocks.1.bias"}
        assert shape.buffers == 12

    def test_units_are_those_that_fsdp_gathers(self):
        units = pytest.importorskip("accel_fsdp.wrapping").find_units
        pairs = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), stack(2)]) for _ in range(2))
        named_parts = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(2, 4), "down": nn.Linear(4, 2)}) for _ in range(2))
        nested = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2)))
        for model in (Tower(), stack(), nested, pairs, named_parts):
            named = {module: name for name, module in model.named_modules()}
            ours = {each.unit for each in shape_of_model(model).parameters} - {ROOT}
            assert ours == {named[unit] for unit in units(model)}

    def test_headers_of_files_tell_what_the_model_tells(self, tmp_path):
        model = Tower()
        state = {name: each for name, each in model.state_dict().items() if name != "scale"}
        half = len(state) // 2
        save_file(dict(list(state.items())[:half]), tmp_path / "model-1.safetensors")
        save_file(dict(list(state.items())[half:]), tmp_path / "model-2.safetensors", metadata={"format": "pt"})
        of_files, of_model = shape_of_files(tmp_path), shape_of_model(model)
        assert sorted(of_files.parameters, key=repr) == sorted(of_model.parameters, key=repr)

    def test_a_model_that_a_folder_has_in_two_formats_counts_once(self, tmp_path):
        state = {f"model.layers.{number}.weight": torch.zeros(4, 4) for number in range(4)}
        save_file(
            {name.removeprefix("model."): each for name, each in state.items()}, tmp_path / "consolidated.safetensors"
        )
        save_file(state, tmp_path / "model.safetensors")
        assert {each.name for each in shape_of_files(tmp_path).parameters} == {*state}
        (tmp_path / "model.safetensors").unlink()
        parts = {"model-1.safetensors": dict([*state.items()][:3]), "model-2.safetensors": dict([*state.items()][3:])}
        for name, part in parts.items():
            save_file(part, tmp_path / name)
        named = {weight: name for name, part in parts.items() for weight in part}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
        assert {each.name for each in shape_of_files(tmp_path).parameters} == {*state}

    @pytest.mark.parametrize(
        ("index", "message"),
        [
            ("[]", r"index.json should be an index of weights, .* but it is not. Save or download it again"),
            ('{"weight_map": {"a": 1}}', "should be an index of weights"),
            ("{", "should be an index of weights"),
            (
                '{"weight_map": {"a": "model-2.safetensors"}}',
                "cannot be read: No such file .*model-2",
            ),
        ],
    )
    def test_an_index_that_names_no_files_is_refused(self, tmp_path, index, message):
        save_file({"a": torch.zeros(4, 4)}, tmp_path / "model-1.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises((CheckpointError, FileNotFoundError), match=message):
            shape_of_files(tmp_path)

    def test_in_files_a_tied_weight_counts_once_and_integers_by_their_bytes(self, tmp_path):
        state = {"a": torch.zeros(4, 4), "scale": torch.zeros((), dtype=torch.int64)}
        save_file(state, tmp_path / "model.safetensors", metadata={"aliases": '{"b": "a"}'})
        shape = shape_of_files(tmp_path)
        assert ([each.name for each in shape.parameters], shape.buffers) == (["a"], 8)

    def test_nothing_of_a_large_model_is_allocated(self):
        with init_empty_weights():
            model = stack(300)
        estimate = estimate_memory(model, batch=torch.empty(4, WIDTH, device="meta"), optimizer="sgd")
        assert estimate.row("single", "fp32").weights == 300 * LAYER
        assert all(each.is_meta and each.grad is None for each in model.parameters())


class TestActivations:
    def test_storages_count_once_until_they_are_freed(self):
        with LiveBytes() as live:
            x = torch.empty(100, device="meta")
            view = x[:10].view(2, 5)
            assert live.live == 400
            y = x + 1
            assert live.live == 800
            del x, view
            assert live.live == 400
            del y
        assert (live.live, live.peak) == (0, 800)

    def test_a_chain_keeps_its_inputs_until_their_gradients_are_complete(self):
        model, rows = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)), 32
        timeline = trace(model, torch.empty(rows, 8), shape_of_model(model), FP32, lambda output: output.sum())
        output = rows * 8 * 4
        assert timeline.forward == 2 * output  # the batch is not in: it was there before
        first, second = timeline.backward
        assert (first.parameter, second.parameter) == ("1.weight", "0.weight")
        assert output <= first.peak <= 3 * output + 8 * 8 * 4
        assert second.left < output

    def test_attention_is_the_fused_one(self):
        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(16, 48)

            def forward(self, x):
                q, k, v = self.linear(x).view(*x.shape[:2], 1, 48).transpose(1, 2).chunk(3, -1)
                return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        model = Attention()
        timeline = trace(model, torch.empty(1, 4096, 16), shape_of_model(model), FP32)
        assert timeline.peak < 4096 * 4096 * 4 // 8

    def test_the_copies_of_autocast_are_in_unless_weights_are_gathered_in_its_dtype(self):
        model, bf16 = stack(), read_precision("bf16")
        shape, batch = shape_of_model(model), torch.empty(1, WIDTH)
        cast = trace(model, batch, shape, bf16).forward - trace(model, batch, shape, bf16, gathered=True).forward
        assert 4 * WIDTH * WIDTH * 2 <= cast <= 4 * LAYER // 2

    def test_the_model_stays_as_it_is(self):
        model, x = stack(), torch.ones(2, WIDTH)
        before = {name: each.clone() for name, each in model.state_dict().items()}
        estimate_memory(model, batch=x, dtypes=["bf16-true"])
        assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
        assert all(each.grad is None and not each._post_accumulate_grad_hooks for each in model.parameters())

    def test_what_a_forward_keeps_in_attributes_stays_out_of_the_model(self):
        class Caches(nn.Linear):
            cache = None

            def forward(self, x):
                self.cache = super().forward(x)
                return self.cache

        model = Caches(4, 4).eval()
        assert row(model, "single", batch=torch.ones(1, 4)).complete
        assert model.cache is None
        assert not model.training

    def test_checkpointed_blocks_are_computed_again(self):
        class Checkpointed(nn.Module):
            def __init__(self, checkpoints):
                super().__init__()
                self.checkpoints = checkpoints
                self.blocks = nn.ModuleList(
                    nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(8)
                )

            def forward(self, x):
                for block in self.blocks:
                    x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
                return x

        whole, again = (
            trace(model, torch.empty(1024, 8), shape_of_model(model), FP32).peak
            for model in (Checkpointed(checkpoints=False), Checkpointed(checkpoints=True))
        )
        assert again < whole / 4

    def test_a_forward_that_looks_at_values_says_that_activations_are_unknown(self):
        class Looks(nn.Linear):
            def forward(self, x):
                return super().forward(x) if x.sum().item() > 0 else x

        model = Looks(4, 4)
        with pytest.raises(ActivationsUnknownError, match="does not run without memory"):
            trace(model, torch.ones(1, 4), shape_of_model(model), FP32)
        estimate = estimate_memory(model, batch=torch.ones(1, 4), dtypes=["fp32"], strategies=["single"])
        assert estimate.rows[0].activations is None
        assert estimate.assumptions["activations in fp32"].startswith("unknown: its forward does not run")


class TestOptimizers:
    @pytest.mark.parametrize(
        ("name", "elements"),
        [("sgd", 0), ("momentum", 1), ("adam", 2), ("adamw", 2), ("rmsprop", 1), ("adagrad", 1), ("lion", 1)],
    )
    def test_state_by_name(self, name, elements):
        counted = name in ("adam", "adamw", "rmsprop", "adagrad")
        assert cost_of(name, [(8, 8), (8,)], torch.float32, False).state == elements * 72 * 4 + counted * 2 * STEPS

    @pytest.mark.parametrize(
        "kind", [torch.optim.AdamW, torch.optim.Adafactor, torch.optim.RAdam, torch.optim.Adadelta, torch.optim.NAdam]
    )
    def test_state_of_torchs_optimizers_is_what_they_really_keep(self, kind):
        shapes = [(16, 8), (16,), (4, 4, 3, 3)]
        parameters = [nn.Parameter(torch.ones(each)) for each in shapes]
        optimizer = kind(parameters)
        for each in parameters:
            each.grad = torch.ones_like(each)
        optimizer.step()
        kept = [
            value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
        ]
        name = f"torch.optim:{kind.__name__}"
        for given in (kind, name):
            assert cost_of(given, shapes, torch.float32, False).state == sum(each.nbytes for each in kept)

    def test_adafactor_keeps_rows_and_columns(self):
        assert cost_of("adafactor", [(1000, 500)], torch.float32, False).state == (1000 + 500) * 4 + STEPS

    def test_a_step_needs_one_parameter_at_a_time_or_all_of_them_on_an_accelerator(self):
        shapes = [(100,)] * 10
        assert cost_of("adamw", shapes, torch.float32, accelerator=False).temporary <= 3 * 400
        assert cost_of("adamw", shapes, torch.float32, accelerator=True).temporary >= 10 * 400

    def test_state_in_eight_bits_is_that_of_bitsandbytes(self):
        kind = pytest.importorskip("bitsandbytes").optim.AdamW8bit
        shapes = [(100, 100), (64,), (4096,)]
        parameters = [nn.Parameter(torch.ones(each)) for each in shapes]
        optimizer = kind(parameters)
        for each in parameters:
            each.grad = torch.ones_like(each)
        optimizer.step()
        kept = {
            value.untyped_storage().data_ptr(): value.nbytes
            for state in optimizer.state.values()
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and "qmap" not in name  # tables that all parameters share
        }
        assert cost_of("adamw8bit", shapes, torch.float32, False).state == sum(kept.values())

    def test_one_that_cannot_be_tried_says_so(self):
        with pytest.raises(ValueError, match=r"'LBFGS' was to step parameters without values.*closure.*Choose"):
            cost_of(torch.optim.LBFGS, [(4,)], torch.float32, False)


class TestStrategies:
    def test_one_process_has_everything(self):
        found = row(stack(), "single", optimizer="sgd", batch=torch.empty(1, WIDTH))
        assert (found.weights, found.gradients, found.optimizer, found.communication) == (4 * LAYER, 4 * LAYER, 0, 0)
        assert found.ranks == 1
        assert 8 * LAYER <= found.peak < 8 * LAYER + 8192
        assert found.moments["step"] == 8 * LAYER

    def test_ddp_has_room_for_all_gradients_from_the_beginning(self):
        options = {"optimizer": "momentum", "batch": torch.empty(1, WIDTH)}
        ddp, single = row(stack(), "ddp", **options), row(stack(), "single", **options)
        assert ddp.moments["step"] == single.moments["step"]
        assert ddp.moments["forward"] - single.moments["forward"] == 4 * LAYER

    def test_fsdp_keeps_a_part_and_gathers_units(self):
        found = row(stack(), "fsdp", optimizer="adamw", device="cpu")
        assert (found.weights, found.gradients) == (2 * LAYER, 2 * LAYER)
        assert found.optimizer == 4 * LAYER + 8 * STEPS
        kept = found.weights + found.optimizer
        assert found.moments["forward"] == kept + 3 * LAYER
        # While the third is reduced: sharded gradients of three, the next unit, what is reduced, and gloo's copy of it.
        assert found.moments["backward"] == kept + 3 * LAYER // 2 + 3 * LAYER
        found = row(stack(), "fsdp", optimizer="adamw", device="accelerator")
        # At the third: sharded gradients of two, the unit, the next one, what was reduced last, the gradient of its bias.
        assert found.moments["backward"] == kept + 2 * LAYER // 2 + 3 * LAYER + WIDTH * 4

    def test_fsdp_on_cpus_reduces_a_copy_of_a_copy(self):
        """gloo copies what it reduces, and the part of each rank is another tensor; others reduce where it lies."""
        model, whole = nn.Sequential(nn.Linear(WIDTH, WIDTH)), LAYER
        found = row(model, "fsdp", optimizer="sgd", device="cpu")
        assert found.moments["backward"] == found.weights + whole + whole + whole // 2
        found = row(model, "fsdp", optimizer="sgd", device="accelerator")
        assert found.moments["backward"] == found.weights + whole + whole

    def test_fsdp_keeps_what_is_in_no_block_gathered(self):
        found = row(Tower(), "fsdp", optimizer="sgd", device="cpu")
        root = 2 * 10 * WIDTH * 4
        assert found.moments["forward"] == found.weights + root + 3 * LAYER

    @pytest.mark.parametrize("stage", [1, 2])
    def test_zero_adds_masters_and_a_bucket_with_its_copy(self, stage):
        found = row(stack(), f"zero{stage}", optimizer="adamw", device="cpu")
        assert found.weights == 4 * LAYER + 2 * LAYER
        assert found.optimizer == 4 * LAYER + STEPS
        assert found.moments["backward"] == found.weights + found.optimizer + 2 * 4 * LAYER
        assert found.moments["step"] == found.weights + found.optimizer + 2 * LAYER + 2 * 2 * LAYER

    def test_zero_3_shares_weights_out_and_gathers_them_all(self):
        found = row(stack(), "zero3", optimizer="sgd", device="cpu")
        assert found.weights == 4 * LAYER
        kept = found.weights + 2 * LAYER + 4 * LAYER  # gradients, and what is written of the bucket
        assert found.moments["forward"] == kept + 2 * 4 * LAYER

    def test_masters_are_in_fp32_beside_parameters_in_bfloat16(self):
        assert row(stack(), "zero2", "bf16-true").weights == 4 * LAYER // 2 + 2 * LAYER
        assert row(stack(), "zero3", "bf16-true").weights == LAYER + 2 * LAYER
        assert row(stack(), "zero3", "fp32").weights == 2 * LAYER

    def test_a_bucket_is_there_as_a_whole_on_an_accelerator(self):
        assert row(stack(), "zero2", device="accelerator").peak > 500_000_000 * 4
        assert row(stack(), "zero2", device="cpu").peak < 50 * LAYER

    def test_a_model_beyond_the_bucket_is_reduced_piece_by_piece(self, monkeypatch):
        monkeypatch.setattr("accel_big_model.estimate.zero.BUCKET", LAYER // 4)
        found = row(stack(), "zero2", optimizer="sgd", device="cpu")
        assert found.moments["backward"] == found.weights + 2 * LAYER + 2 * LAYER

    def test_tensor_parallel_ranks_divide_matrices_alone(self):
        estimate = estimate_memory(stack(), dtypes=["fp32"], strategies=["tensor"], world_size=4, tensor_parallel=2)
        found = estimate.row("tensor", "fp32")
        assert found.ranks == 4
        assert found.weights == 4 * (WIDTH * WIDTH // 2 + WIDTH) * 4 // 2
        assert "an upper bound" in found.notes[0]

    def test_tensor_parallel_ranks_divide_what_a_plan_names(self):
        known = {"dtypes": ["fp32"], "strategies": ["tensor", "fsdp"], "world_size": 4, "tensor_parallel": 2}
        model = stack()
        plan = {"0": "colwise", "1": "rowwise"}
        estimate = estimate_memory(model, batch=torch.empty(64, WIDTH), parallelize_plan=plan, **known)
        found, whole = estimate.row("tensor", "fp32"), estimate.row("fsdp", "fp32")
        numel = 2 * (WIDTH * WIDTH // 2) + WIDTH // 2 + WIDTH + 2 * (WIDTH * WIDTH + WIDTH)  # two of four are divided
        assert found.ranks == 4
        assert found.weights == numel * 4 // 2
        assert found.activations < whole.activations
        assert "divided by the plan" in found.notes[0]
        assert all(not parameter.is_meta for parameter in model.parameters())

    @pytest.mark.parametrize(
        ("plan", "ranks", "message"),
        [
            ({"9": "colwise"}, 2, r"'9': 'colwise'.*names no module"),
            ({"0": "sequence"}, 2, "is neither colwise nor rowwise: leave it out"),
            ({"0": "colwise"}, 3, f"divides 0, and 3 ranks do not divide its size {WIDTH}"),
        ],
    )
    def test_a_plan_that_misfits_is_refused(self, plan, ranks, message):
        with pytest.raises(ValueError, match=message):
            estimate_memory(stack(), parallelize_plan=plan, world_size=12, tensor_parallel=ranks)
        tower = Tower()
        tower.head.weight = tower.embed.weight
        with pytest.raises(ValueError, match="divides head, whose weight is tied: leave it out"):
            estimate_memory(tower, parallelize_plan={"head": "colwise"}, tensor_parallel=2)
        with pytest.raises(ValueError, match="strategy 'tensor', which it is for, is not asked for"):
            estimate_memory(stack(), parallelize_plan={"0": "colwise"}, strategies=["fsdp"])
        norms = nn.Sequential(nn.LayerNorm(4))
        with pytest.raises(ValueError, match="gives 0 the word 'colwise', and it is a LayerNorm"):
            estimate_memory(norms, parallelize_plan={"0": "colwise"}, tensor_parallel=2)

    def test_a_plan_for_files_without_code_is_refused(self, tmp_path):
        save_file(stack().state_dict(), tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match="there are only files with weights, and no layers to divide"):
            estimate_memory(tmp_path, parallelize_plan={"0": "colwise"})

    def test_frozen_parameters_have_no_gradients_and_no_state(self):
        model = stack()
        model[0].requires_grad_(requires_grad=False)
        for strategy in ("single", "ddp", "fsdp", "zero1", "zero3"):
            found = row(model, strategy, optimizer="momentum", batch=torch.empty(1, WIDTH))
            share = 1 if found.ranks == 1 or strategy == "ddp" else 2
            assert found.optimizer == 3 * LAYER // share
            assert found.gradients % (3 * LAYER // share) == 0

    def test_more_memory_fits_and_what_is_unknown_is_not_promised(self):
        known = row(stack(), "single", batch=torch.empty(1, WIDTH))
        assert known.complete
        assert (known.fits(known.peak), known.fits(known.peak - 1)) == (True, False)
        unknown = row(stack(), "single")
        assert not unknown.complete
        assert (unknown.fits(unknown.peak), unknown.fits(unknown.peak - 1)) == (None, False)

    def test_what_an_engine_refuses_is_left_out_with_its_reason(self):
        estimate = estimate_memory(stack(), dtypes=["fp16-true"], strategies=["zero2", "ddp"])
        assert [each.strategy for each in estimate.rows] == ["ddp"]
        assert "refuses" in estimate.assumptions["zero2 in fp16-true"]
        estimate = estimate_memory(stack(), dtypes=["fp32"], strategies=["ddp"], world_size=1)
        assert "several processes" in estimate.assumptions["ddp in fp32"]
        estimate = estimate_memory(stack(), dtypes=["fp32"], strategies=["zero1"], optimizer="adafactor")
        assert not estimate.rows
        assert "flat parts" in estimate.assumptions["zero1 in fp32"]

    def test_a_model_may_be_given_by_its_text(self, tmp_path):
        save_file(stack().state_dict(), tmp_path / "model.safetensors")
        for model in (tmp_path, str(tmp_path), f"{__name__}:stack"):
            estimate = estimate_memory(model, dtypes=["fp32"], strategies=["single"])
            assert (estimate.model, estimate.rows[0].weights) == (str(model), 4 * LAYER)

    def test_integers_are_of_weights_alone(self):
        estimate = estimate_memory(stack(), dtypes=["int4"])
        assert estimate.row("weights", "int4").weights == 4 * LAYER // 8
        assert estimate.row("weights", "int4").gradients is None
        with pytest.raises(KeyError):
            estimate.row("ddp", "int4")


def command(capsys, *words) -> tuple[int, str, str]:
    status = main([*words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


class TestCommand:
    def test_it_is_a_subcommand_of_accel(self):
        (found,) = importlib.metadata.entry_points(group="accel.commands", name="estimate-memory")
        assert found.load() is main

    def test_a_callable_with_arguments(self, capsys):
        words = ("--arguments", '{"layers": 6}', "--strategy", "single,ddp", "--dtype", "fp32", "--world", "4")
        batch = ("--input", f"{__name__}:ids", "--memory", "1MiB", "--optimizer", "sgd")
        status, text, _ = command(capsys, f"{__name__}:tower", *words, *batch)
        assert status == 0
        lines = text.splitlines()
        assert lines[0].startswith(f"{__name__}:tower: 26240 parameters; sgd; batch of a rank: int64[2, 8]")
        assert lines[2].split()[:2] == ["dtype", "strategy"]
        assert [line.split()[1] for line in lines[3:5]] == ["single", "ddp"]
        assert lines[3].endswith("1 × 1 MiB: yes")
        assert lines[4].endswith("4 × 1 MiB: yes")

    def test_a_shape_is_a_floating_batch(self, capsys):
        words = (
            f"{__name__}:stack",
            "--input",
            "64",
            "--batch",
            "3",
            "--dtype",
            "fp32",
            "--strategy",
            "single",
            "--json",
        )
        status, text, _ = command(capsys, *words)
        assert status == 0
        (found,) = json.loads(text)["rows"]
        assert found["activations"] >= 4 * 3 * WIDTH * 4
        assert found["complete"]

    def test_json_has_bytes_moments_and_formulas(self, capsys):
        status, text, _ = command(capsys, f"{__name__}:stack", "--json", "--world", "2")
        found = json.loads(text)
        assert status == 0
        assert (found["memory"], found["parameters"]) == (80 * 2**30, 4 * LAYER // 4)
        first = found["rows"][0]
        assert (first["strategy"], first["dtype"], first["weights"], first["activations"]) == (
            "single",
            "fp32",
            4 * LAYER,
            None,
        )
        assert set(first["moments"]) == {"forward", "backward", "step"}
        assert first["peak"] == max(first["moments"].values())
        assert first["fits"] is None
        assert len(found["rows"]) == 14
        assert {"single", "zero3", "activations", "optimizer", "activations in fp32"} <= set(found["assumptions"])

    def test_unknown_activations_are_shown_as_a_lower_bound(self, capsys):
        status, text, _ = command(capsys, f"{__name__}:stack", "--strategy", "single", "--dtype", "fp32", "int8")
        assert status == 0
        assert "unknown" in text.splitlines()[3]
        assert "≥ " in text.splitlines()[3]
        assert "activations in fp32: unknown: no batch was given (--input, or batch=)" in text
        assert "nothing is trained in int8" in text

    def test_a_folder_of_files_without_code(self, capsys, tmp_path):
        save_file(Tower().state_dict(), tmp_path / "model.safetensors")
        status, text, _ = command(capsys, str(tmp_path), "--strategy", "fsdp", "--dtype", "fp32")
        assert status == 0
        assert "there are only files with weights" in text

    @pytest.mark.parametrize(
        ("count", "text"),
        [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (80 * 2**30, "80 GiB"), (3 * 2**40, "3 TiB")],
    )
    def test_sizes_have_units(self, count, text):
        assert size(count) == text


class TestBadInput:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--dtype", "bf61"], r"dtype 'bf61' is unknown. Did you mean 'bf16'\? Known are fp32, bf16"),
            (["--strategy", "zero4"], r"Strategy 'zero4' is unknown. Did you mean 'zero\d'\? Known are single, ddp"),
            (["--world", "0"], "world_size=0: expected how many processes, at least 1"),
            (["--tensor-parallel", "3"], "tensor_parallel=3 does not divide world_size=8"),
            (["--tensor-parallel", "0"], "tensor_parallel=0: expected"),
            (["--memory", "much"], "'much' is no size in bytes"),
            (["--optimizer", "adamm"], r"Optimizer 'adamm' is unknown. Did you mean 'adamw?'\? Known are sgd"),
            (
                ["--optimizer", "torch.optim:Adamm"],
                "The optimizer was given 'torch.optim:Adamm', which cannot be imported",
            ),
            (["--device", "gpu"], "device 'gpu' is unknown. Known are accelerator, cpu"),
            (["--batch", "0"], "--batch 0: expected a number of at least 1"),
            (["--sequence", "-1"], "--sequence -1: expected a number of at least 1"),
            (["--input", "3,4"], "--input was given '3,4': expected a shape without rows such as 3x224x224"),
            (["--input", "nowhere:f"], "--input was given 'nowhere:f', which cannot be imported from here"),
            (["--arguments", "{"], "--arguments '{' is no JSON"),
            (["--arguments", "[4]"], r"--arguments '\[4\]': expected an object of JSON"),
            (["--arguments", '{"depth": 4}'], "could not be built without memory: TypeError: .*depth"),
        ],
    )
    def test_each_has_its_message(self, capsys, words, message):
        status, text, error = command(capsys, f"{__name__}:stack", *words)
        assert (status, text) == (2, "")
        assert re.search(message, error), error

    @pytest.mark.parametrize(
        ("model", "message"),
        [
            (
                "no.such.module:Model",
                "'no.such.module:Model', which cannot be imported from here: No module named 'no'",
            ),
            (f"{__name__}:Missing", "which cannot be imported from here: module .* has no attribute 'Missing'"),
            (f"{__name__}:WIDTH", "which is of type int and cannot be called"),
            (f"{__name__}:ids", "was to return a torch.nn.Module, and returned Tensor"),
            ("./nowhere", "nowhere was to be a model, and does not exist: expected a folder, a config.json"),
            (__file__, "was to be a model: expected a folder, a config.json"),
        ],
    )
    def test_a_model_that_is_none(self, capsys, model, message):
        status, text, error = command(capsys, model)
        assert (status, text) == (2, "")
        assert re.search(message, error), error

    def test_a_folder_without_a_model(self, capsys, tmp_path):
        status, _, error = command(capsys, str(tmp_path))
        assert status == 2
        assert "has neither config.json nor *.safetensors" in error

    def test_a_file_that_is_no_safetensors_file(self, capsys, tmp_path):
        (tmp_path / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00not json")
        status, _, error = command(capsys, str(tmp_path))
        assert status == 2
        assert "should hold weights as safetensors, but it does not" in error

    def test_without_transformers_a_configuration_says_what_to_type(self, capsys, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "transformers", None)
        (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1, "n_embd": 12, "vocab_size": 10}')
        for model in (str(tmp_path), str(tmp_path / "config.json"), "someone/their-model"):
            status, _, error = command(capsys, model)
            assert status == 2
            assert "Type: pip install transformers." in error
        save_file({"layers.0.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
        status, text, _ = command(capsys, str(tmp_path), "--dtype", "fp32", "--strategy", "single")
        assert status == 0
        assert "16 parameters" in text


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}


class TestTransformers:
    @pytest.fixture(autouse=True)
    def library(self):
        self.transformers = pytest.importorskip("transformers")

    def estimated(self, capsys, model, *words):
        status, text, error = command(capsys, str(model), "--json", "--world", "2", "--dtype", "fp32", *words)
        assert status == 0, error
        return json.loads(text)

    def test_a_configuration_is_a_model_and_tells_its_batch(self, capsys, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        expected = self.transformers.LlamaForCausalLM(self.transformers.LlamaConfig(**LLAMA)).num_parameters()
        short, long = (
            self.estimated(capsys, tmp_path, "--batch", "2", "--sequence", str(length)) for length in (32, 64)
        )
        assert short["parameters"] == expected
        assert 1.9 < long["rows"][0]["activations"] / short["rows"][0]["activations"] < 2.1
        assert short["rows"][0]["activations"] > 2 * 32 * 100 * 4  # logits
        whole = self.estimated(capsys, tmp_path / "config.json", "--batch", "2")  # as long as the model takes
        assert 3.8 < whole["rows"][0]["activations"] / short["rows"][0]["activations"] < 4.2

    def test_without_architectures_it_is_the_model_without_a_head(self, capsys, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "architectures": None}))
        found = self.estimated(capsys, tmp_path)
        assert (
            found["parameters"] == self.transformers.LlamaModel(self.transformers.LlamaConfig(**LLAMA)).num_parameters()
        )

    def test_a_model_for_pictures_tells_its_batch(self, capsys, tmp_path):
        config = {"architectures": ["ViTModel"], "model_type": "vit", "hidden_size": 32, "num_hidden_layers": 2}
        config |= {"num_attention_heads": 2, "intermediate_size": 64, "image_size": 32, "patch_size": 8}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert self.estimated(capsys, tmp_path)["rows"][0]["complete"]

    def test_a_name_is_looked_up_on_the_hub(self, capsys, monkeypatch):
        asked = []

        def from_pretrained(name, **options):
            asked.append((name, options["trust_remote_code"]))
            return self.transformers.LlamaConfig(**LLAMA)

        monkeypatch.setattr(self.transformers.AutoConfig, "from_pretrained", from_pretrained)
        assert self.estimated(capsys, "someone/their-model", "--trust_remote_code")["rows"][0]["complete"]
        assert asked == [("someone/their-model", True)]

    def test_a_name_that_is_not_on_the_hub_says_what_is_expected(self, capsys, monkeypatch):
        def from_pretrained(name, **_):
            raise OSError(f"{name} is not a local folder and is not a valid model identifier")

        monkeypatch.setattr(self.transformers.AutoConfig, "from_pretrained", from_pretrained)
        status, _, error = command(capsys, "someone/their-model")
        assert status == 2
        assert "'someone/their-model' is neither a file nor a folder here" in error
        assert "Expected a folder, a config.json, a name on the Hugging Face Hub, or module:function" in error

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{}", "has no 'model_type'"),
            ("{", "is no configuration of transformers"),
            ('{"model_type": "no-such"}', "no-such"),
        ],
    )
    def test_a_configuration_that_is_none(self, capsys, tmp_path, text, message):
        (tmp_path / "config.json").write_text(text)
        status, _, error = command(capsys, str(tmp_path))
        assert status == 2
        assert message in error


def test_nothing_in_the_folder_of_a_model_is_executed(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1, "n_embd": 12, "vocab_size": 10}')
    (tmp_path / "transformers.py").write_text("open('executed', 'w')")
    call = "from accel_big_model.estimate.command import main; sys.exit(main(['.', '--sequence', '8', '--strategy', 'ddp']))"
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.pop(0); {call}"], cwd=tmp_path, check=False, timeout=120
    )
    assert not (tmp_path / "executed").exists()
