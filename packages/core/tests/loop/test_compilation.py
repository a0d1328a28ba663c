"""What `dynamo_backend` and `TorchDynamoPlugin` make of a model: one compilation each, or one for all equal blocks."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from accel_core import Accelerator, Precision, PrecisionPolicy, TorchDynamoPlugin
from accel_core.base.vocabulary import DynamoBackend
from accel_core.loop.compilation import compile_calls, forget_compiled
from accel_testing import run_ranks

# The compiler asks inputs for `grad`, and hides what torch says of those that are no leaves only where warnings are shown.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Block(nn.Module):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, hidden), nn.Linear(hidden, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A stem, a list of blocks of which each has its own width, and a head."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(Block(width) for width in widths)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Backend:
    """Runs the graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0
        self.options: dict[str, Any] = {}

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
        self.graphs += 1
        self.options = options
        return graph.forward


def replaying(calls: int, graph: torch.fx.GraphModule, inputs: Any, options: Any) -> Callable[..., Any]:
    """Stands for CUDA graphs on a CPU: a backward, of which a step has so many calls, writes where that of the step before has."""
    assert options == {"triton.cudagraphs": True}

    def forward(traced: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        return make_boxed_func(traced.forward)

    def backward(traced: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        places: list[list[torch.Tensor | None]] = []

        def run(*given: torch.Tensor) -> list[torch.Tensor | None]:
            found = traced.forward(*given)
            place = (
                places.pop(0) if len(places) == calls else [None if each is None else each.clone() for each in found]
            )
            places.append(place)
            for memory, value in zip(place, found, strict=True):
                if memory is not None:
                    memory.copy_(value)
            return [None if each is None else each.detach() for each in place]

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=forward, bw_compiler=backward)(graph, inputs)


class LowCompute(Precision):
    policy = PrecisionPolicy(compute=torch.bfloat16, output=torch.float32)


def rows(count: int = 16) -> torch.Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(1))


def trained(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of its mean square."""
    model.zero_grad()
    output = model(x)
    output.pow(2).mean().backward()
    return [output.detach(), *(parameter.grad.clone() for parameter in model.parameters())]  # type: ignore[union-attr]


def close(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(left, right, strict=True))


def regional(backend: Any) -> TorchDynamoPlugin:
    return TorchDynamoPlugin(backend=backend, use_regional_compilation=True)


@pytest.mark.parametrize("backend", ["eager", "EAGER", DynamoBackend.EAGER])
def test_a_backend_is_named_in_either_case_or_by_its_member(backend: str) -> None:
    for options in ({"dynamo_backend": backend}, {"dynamo_plugin": TorchDynamoPlugin(backend=backend)}):
        model = Accelerator(**options).prepare(Net(8))
        torch._dynamo.utils.counters.clear()
        model(rows())
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_backend_may_be_a_function_and_gets_the_options() -> None:
    backend = Backend()
    Accelerator(dynamo_backend=backend).prepare(Net(8))(rows())
    assert (backend.graphs, backend.options) == (1, {})
    plugin = TorchDynamoPlugin(backend=backend, options={"level": 3})
    Accelerator(dynamo_plugin=plugin).prepare(Net(8))(rows())
    assert (backend.graphs, backend.options) == (2, {"options": {"level": 3}})
    assert plugin.options == {"level": 3}


@pytest.mark.parametrize(
    "plugin",
    [
        TorchDynamoPlugin(backend="no", use_regional_compilation=True),
        TorchDynamoPlugin(backend=DynamoBackend.NO),
        TorchDynamoPlugin(backend=Backend(), disable=True),
    ],
)
def test_nothing_is_compiled_when_switched_off(plugin: TorchDynamoPlugin) -> None:
    model = Accelerator(dynamo_plugin=plugin).prepare(Net(8, 8))
    assert not any(module._compiled_call_impl for module in model.modules())


def test_what_was_chosen_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    explained = str(Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="aot_eager")).explain())
    assert "aot_eager" in explained
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    assert "ACCELERATE_DYNAMO_BACKEND" in str(Accelerator().explain())


def test_options_of_the_compiler_hold() -> None:
    class Broken(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    whole = Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="eager", fullgraph=True))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        whole.prepare(Broken(3, 1))(rows())

    for dynamic, graphs in ((True, 1), (False, 3)):
        backend = Backend()
        model = Accelerator(dynamo_plugin=TorchDynamoPlugin(backend=backend, dynamic=dynamic)).prepare(Net(8))
        for count in (4, 5, 6):
            model(rows(count))
        assert backend.graphs == graphs


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            lambda: Accelerator(
                dynamo_plugin=TorchDynamoPlugin(mode="default", options={"max_autotune": True})
            ).prepare(nn.Linear(1, 1)),
            RuntimeError,
            "Either mode or options can be specified",
        ),
        (lambda: TorchDynamoPlugin(fullgraph="no"), TypeError, "fullgraph='no'. is a str: give True or False"),
        (lambda: TorchDynamoPlugin(dynamic="no"), TypeError, "dynamic='no'. is a str"),
        (
            lambda: Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="inducter")),
            ValueError,
            r"TorchDynamoPlugin\(backend='inducter'\) is not a backend .* Known: .*eager.* Type 'inductor' if",
        ),
        (
            lambda: Accelerator(dynamo_plugin=TorchDynamoPlugin(mode="max-autotone")).prepare(nn.Linear(1, 1)),
            RuntimeError,
            "Unrecognized mode=max-autotone, should be one of: default",
        ),
        (lambda: Accelerator(dynamo_plugin="eager"), TypeError, "dynamo_plugin is a str, expected TorchDynamoPlugin"),
        (
            lambda: Accelerator(dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin()),
            ValueError,
            "dynamo_backend='eager' and dynamo_plugin=.* were both given.* leave the other out",
        ),
    ],
)
def test_what_cannot_hold_is_refused(given: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        given()


def test_a_variable_beside_the_object_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    with pytest.raises(ValueError, match="ACCELERATE_DYNAMO_BACKEND='eager' and dynamo_plugin=.* were both given"):
        Accelerator(dynamo_plugin=TorchDynamoPlugin())


def test_every_model_of_a_process_is_compiled() -> None:
    """The compiler gives up after eight variants of one function, so that models must not share theirs."""
    backend = Backend()
    accelerator = Accelerator(dynamo_backend=backend)
    for features in range(1, 13):
        accelerator.prepare(nn.Linear(3, features))(rows())
    assert backend.graphs == 12


def test_equal_blocks_are_compiled_once() -> None:
    backend = Backend()
    expected = trained(Net(*[8] * 12), rows())
    model = Net(*[8] * 12)
    accelerator = Accelerator(dynamo_plugin=regional(backend))
    prepared = accelerator.prepare(model)
    assert close(trained(prepared, rows()), expected)
    assert backend.graphs == 1
    assert accelerator.unwrap_model(prepared) is model
    assert accelerator.get_state_dict(prepared).keys() == Net(*[8] * 12).state_dict().keys()


def test_unequal_blocks_are_compiled_one_by_one() -> None:
    """Ten kinds are more than the compiler takes through one function."""
    backend = Backend()
    widths = [5, *range(5, 15)]
    model = Accelerator(dynamo_plugin=regional(backend)).prepare(Net(*widths))
    assert close(trained(model, rows()), trained(Net(*widths), rows()))
    assert backend.graphs == 10


def test_blocks_are_the_members_of_the_outermost_list_that_repeats() -> None:
    def stage(width: int, count: int) -> nn.Sequential:
        return nn.Sequential(*[Block(width) for _ in range(count)])

    def regions(model: nn.Module) -> set[str]:
        compile_calls(model, {"backend": "eager", "use_regional_compilation": True})
        return {name for name, module in model.named_modules() if module._compiled_call_impl is not None}

    assert regions(nn.Sequential(stage(8, 2), stage(9, 3))) == {"0.0", "0.1", "1.0", "1.1", "1.2"}
    assert regions(nn.Sequential(stage(8, 2), stage(8, 2))) == {"0", "1"}
    assert regions(nn.ModuleDict({"encoder": stage(8, 2), "head": nn.Linear(4, 1)})) == {"encoder.0", "encoder.1"}
    assert regions(nn.Sequential(*[Block()] * 3)) == {"0"}  # one block, which runs three times


def test_a_model_without_repeated_blocks_is_compiled_whole_and_says_so() -> None:
    backend = Backend()
    accelerator = Accelerator(dynamo_plugin=regional(backend))
    with pytest.warns(UserWarning, match="use_regional_compilation=True .* but Net has no .* compiled as a whole"):
        model = accelerator.prepare(Net(8, 9))
    assert close(trained(model, rows()), trained(Net(8, 9), rows()))
    assert backend.graphs == 1


def test_a_precision_holds_inside_blocks() -> None:
    seen: list[torch.dtype] = []
    model = Net(8, 8)
    model.head.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    model.blocks[1].down.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    prepared = Accelerator(mixed_precision=LowCompute(), dynamo_plugin=regional("eager")).prepare(model)
    assert prepared(rows()).dtype is torch.float32
    assert torch.bfloat16 in seen


def summed(by_blocks: bool) -> tuple[list[float], bool]:
    """How far gradients of windows are from plain ones, and whether the model is in the end what it was."""
    options = {"triton.cudagraphs": True}
    backend = functools.partial(replaying, 2 if by_blocks else 1)
    plugin = TorchDynamoPlugin(backend, fullgraph=True, options=options, use_regional_compilation=by_blocks)
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin, gradient_accumulation_steps=2)
    model, reference, distances = accelerator.prepare(Net(8, 8)), Net(8, 8), []
    for number in range(6):
        x = rows() + number
        with accelerator.accumulate(model):
            accelerator.backward(model(x).pow(2).mean())
        (reference(x).pow(2).mean() / 2).backward()
        if accelerator.sync_gradients:
            pairs = zip(model.parameters(), reference.parameters(), strict=True)
            distances.append(max((ours.grad - plain.grad).abs().max().item() for ours, plain in pairs))
            model.zero_grad()
            reference.zero_grad()
    accelerator.free_memory()
    return distances, type(model) is Net


@pytest.mark.parametrize(
    ("given", "variable", "replayed"),
    [
        ({"mode": "reduce-overhead"}, "", True),
        ({"mode": "max-autotune"}, "", True),
        ({"mode": "max-autotune-no-cudagraphs"}, "", False),
        ({"backend": "cudagraphs"}, "", True),
        ({"options": {"triton.cudagraphs": False}}, "1", False),
        ({}, "1", True),
        ({}, "", False),
    ],
)
def test_gradients_are_kept_wherever_graphs_may_be_replayed(
    given: dict[str, Any], variable: str, replayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CUDAGRAPHS", variable)
    prepared = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(**given)).prepare(Net(8))
    assert (type(prepared) is not Net) is replayed


@pytest.mark.parametrize("by_blocks", [False, True])
def test_micro_batches_add_up_where_graphs_are_replayed(by_blocks: bool) -> None:
    ((distances, restored),) = run_ranks(summed, 1, by_blocks)
    assert len(distances) == 3
    assert max(distances) < 1e-4
    assert restored


def test_free_memory_leaves_what_the_user_compiled() -> None:
    model, own = Net(8, 8), Backend()
    model.blocks[0].compile(backend=own)
    theirs = model.blocks[0]._compiled_call_impl
    for _ in range(2):
        accelerator = Accelerator(dynamo_plugin=regional("eager"))
        accelerator.prepare(model)
        assert model.blocks[0]._compiled_call_impl is not theirs
        assert model.blocks[1]._compiled_call_impl is not None
    accelerator.free_memory()
    assert model.blocks[0]._compiled_call_impl is theirs
    assert model.blocks[1]._compiled_call_impl is None


@pytest.mark.parametrize(
    "plugin",
    [TorchDynamoPlugin(backend="eager"), regional("eager"), TorchDynamoPlugin(Backend(), mode="reduce-overhead")],
)
def test_copies_and_pickles_run_uncompiled(plugin: TorchDynamoPlugin) -> None:
    model = Accelerator(dynamo_plugin=plugin).prepare(Net(8, 8))
    expected = model(rows())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not any(module._compiled_call_impl for module in other.modules())
        assert torch.equal(other(rows()), expected)


def survives(by_blocks: bool) -> bool:
    model = Net(8, 8)
    compile_calls(model, {"backend": "aot_eager", "use_regional_compilation": by_blocks})
    trained(model, rows())
    reference = weakref.ref(model)
    del model
    gc.collect()
    return reference() is not None


def lives() -> list[bool]:
    return [survives(by_blocks) for by_blocks in (False, True)]


def test_compiled_models_die_with_their_last_reference() -> None:
    assert run_ranks(lives, 1) == [[False, False]]


def test_a_strategy_that_hands_regional_options_to_torch_fails_loudly() -> None:
    options = {"backend": "eager", "use_regional_compilation": True}
    with pytest.raises(TypeError, match="use_regional_compilation"):
        Net(8, 8).compile(**options)


def test_forgetting_what_was_never_compiled_changes_nothing() -> None:
    model = Net(8)
    forget_compiled(model)
    assert torch.equal(model(rows()), Net(8)(rows()))


def under_ddp() -> list[bool]:
    """Whether training, without and with synchronisation, and evaluation agree with one process."""
    accelerator = Accelerator(dynamo_plugin=regional("aot_eager"), gradient_accumulation_steps=2)
    part = rows().chunk(2)[accelerator.process_index]
    model = accelerator.prepare(Net(8, 8, 8))
    evaluated = accelerator.prepare_model(Net(8, 8, 8), evaluation_mode=True)
    torch._dynamo.utils.counters.clear()
    for half in part.chunk(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(half).pow(2).mean())
    single = Net(8, 8, 8)
    expected = trained(single, rows())
    found = [parameter.grad for parameter in model.parameters()]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return [
        close(found, expected[1:]),
        torch.allclose(evaluated(rows()), expected[0], atol=1e-6),
        0 < graphs < 3,
        accelerator.get_state_dict(model).keys() == single.state_dict().keys(),
        all(block._compiled_call_impl is not None for block in accelerator.unwrap_model(model).blocks),
    ]


def test_blocks_train_and_evaluate_under_ddp() -> None:
    assert run_ranks(under_ddp, 2, timeout=110) == [[True] * 5] * 2


def graphs(strategy: str) -> list[tuple[int, bool]]:
    """How many graphs a training step is, whole and by blocks, and whether its gradients are those of one process."""
    found, expected = [], trained(Net(8, 8, 8), rows())[1:]
    for by_blocks in (False, True):
        backend = Backend()
        plugin = TorchDynamoPlugin(backend=backend, fullgraph=True, use_regional_compilation=by_blocks)
        accelerator = Accelerator(strategy=strategy, dynamo_plugin=plugin, cpu=True)
        model = accelerator.prepare(Net(8, 8, 8))
        part = rows().chunk(accelerator.num_processes)[accelerator.process_index]
        accelerator.backward(model(part).pow(2).mean())
        found.append((backend.graphs, close([each.grad for each in model.parameters()], expected)))
        torch._dynamo.reset()
    return found


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2)])
def test_a_model_or_its_equal_blocks_are_one_graph_under_each_strategy(strategy: str, ranks: int) -> None:
    assert run_ranks(graphs, ranks, strategy, timeout=60) == [[(1, True), (1, True)]] * ranks


class Hooked(nn.Module):
    """A block that cannot be traced as it is called: a hook of it is none of the compiler's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.seen: list[int] = []
        self.register_forward_hook(torch.compiler.disable(lambda module, *_: module.seen.append(1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


@pytest.mark.parametrize("by_blocks", [False, True])
def test_hooks_of_some_modules_stay_outside_of_what_is_compiled(by_blocks: bool) -> None:
    backend, model = Backend(), nn.Sequential(Hooked(), Hooked(), Hooked())
    own = model[1].forward = functools.partial(Hooked.forward, model[1])
    x = rows().requires_grad_()  # so that the input of the first block is like those of the others
    expected = trained(copy.deepcopy(model), x)
    options = {"backend": backend, "fullgraph": True, "use_regional_compilation": by_blocks}
    for _ in range(2):  # prepared again, it is compiled anew
        compile_calls(model, options, hooked=(model, *model))
        assert close(trained(model, x), expected)
        assert str(inspect.signature(model[0].forward)) == "(x: 'torch.Tensor') -> 'torch.Tensor'"
    assert backend.graphs == 2 * (2 if by_blocks else 3)  # the forward that was set on one of them is another one
    assert all(len(block.seen) == 2 for block in model)
    forget_compiled(model)
    assert model[1].forward is own
    assert not any("forward" in vars(model[number]) for number in (0, 2))


def by_inductor() -> bool:
    model = Accelerator(dynamo_plugin=TorchDynamoPlugin(use_regional_compilation=True)).prepare(Net(8, 8, 8))
    return close(trained(model, rows()), trained(Net(8, 8, 8), rows()))


@pytest.mark.soak
def test_machine_code_computes_the_same(tmp_path: Path) -> None:
    """Needs a C++ compiler."""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    assert run_ranks(by_inductor, 1, timeout=110, env=env) == [True]


def test_the_compiler_is_imported_for_nobody_who_does_not_compile():
    code = "import sys, accel_core; accel_core.Accelerator(cpu=True); print({'torch._dynamo', 'torch._inductor'} & set(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout == "set()\n"
