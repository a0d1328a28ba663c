"""Training under FSDP is training: what a model learns is what it learns whole, in one process, from the global batch."""

import copy
import pickle
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from accel_core import Accelerator, Precision, PrecisionPolicy
from accel_fsdp import FSDP
from accel_testing import run_ranks
from accel_testing.models import FrozenBackbone, Net, NormNet, built

WIDTH, WORDS, LENGTH = 6, 11, 5


class Block(nn.Module):
    """A block with a parameter of one row, which all ranks but one have nothing of."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.full((1,), 0.5))
        self.seen = 0

    def forward(self, x):
        self.seen += 1
        return x + self.gate * self.down(torch.tanh(self.up(self.norm(x))))


class Tiny(nn.Module):
    """A language model: blocks, a head tied to the embedding, a number that cannot be cut, a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("scale", torch.full((2,), 0.5))

    def forward(self, x):
        hidden = self.embed(x) * self.scale[0]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) * self.temperature


def make_optimizer(model):
    named = list(model.named_parameters())
    groups = [
        {"params": [value for _, value in named if value.dim() > 1], "weight_decay": 0.1},
        {"params": [value for _, value in named if value.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)


def batch(step, index=0, count=1, rows=4):
    """What one of `count` shards reads of a global batch of `rows * 2` samples."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randint(0, WORDS, (rows * 2, LENGTH), generator=generator)
    mine = len(x) // count
    return x[index * mine : (index + 1) * mine]


def loss_of(model, x):
    return F.cross_entropy(model(x[:, :-1]).float().flatten(0, 1), x[:, 1:].flatten())


def reference(steps=3):
    """Losses, norms and weights of plain torch on the global batch, each step of two micro-batches."""
    model = built(Tiny)
    optimizer = make_optimizer(model)
    losses, norms = [], []
    for step in range(steps):
        both = [loss_of(model, batch(2 * step + number)) for number in (0, 1)]
        (sum(both) / 2).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses += [float(loss.detach()) for loss in both]
    return losses, norms, dict(model.state_dict())


def train(accelerator, model, optimizer, steps=3):
    """The same under an Accelerator: losses and norms."""
    shard = accelerator._layout.shard
    losses, norms = [], []
    for micro in range(2 * steps):
        with accelerator.accumulate(model):
            loss = loss_of(model, batch(micro, shard.index, shard.count))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses, norms


def trained(strategy, order="together", steps=3, **options):
    accelerator = Accelerator(strategy=strategy, cpu=True, gradient_accumulation_steps=2, **options)
    model = built(Tiny, accelerator.process_index)  # other weights on every rank: those of rank 0 count
    optimizer = make_optimizer(model)
    if order == "together":
        model, optimizer = accelerator.prepare(model, optimizer)
    elif order == "model first":
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
    else:
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(make_optimizer(model))
    losses, norms = train(accelerator, model, optimizer, steps)
    return losses, norms, accelerator.get_state_dict(model)


STRATEGIES = {
    "as it is": {},
    "kept gathered": {"reshard_after_forward": False},
    "one unit": {"wrap": "none"},
    "units by class": {"wrap": ["Linear", "Embedding"]},
    "offloaded": {"cpu_offload": True},
    "recomputed": {"activation_checkpointing": True},
    "ignored": {"ignored_modules": ["blocks.1.*"]},
}


HYBRID = {
    "hybrid": {"replicate": 2},
    "hybrid, kept gathered": {"replicate": 2, "reshard_after_forward": False},
    "kept on two of four": {"reshard_after_forward": 2},
}


class Narrow(Precision):
    """As mixed_precision="bf16" computes."""

    policy = PrecisionPolicy(compute=torch.bfloat16, output=torch.float32)


class Reduced(Precision):
    policy = PrecisionPolicy(reduce=torch.bfloat16)


def stepped_after_an_evaluation(**options):
    """Between backward and step the model is called, so its parameters are gathered when they change."""
    accelerator = Accelerator(strategy=FSDP(**options), cpu=True)
    model = built(Tiny)
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    shard, losses = accelerator._layout.shard, []
    for step in range(3):
        x = batch(step, shard.index, shard.count)
        loss = loss_of(model, x)
        accelerator.backward(loss)
        with torch.set_grad_enabled(step == 1):
            loss_of(model, x)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def shown_after_an_evaluation():
    """The parameters of a model that was only called."""
    accelerator = Accelerator(strategy=FSDP(), cpu=True)
    model = accelerator.prepare(built(Tiny))
    with torch.no_grad():
        model(batch(0))
    shown = {type(parameter).__name__ for name, parameter in model.named_parameters() if parameter.dim()}
    loss_of(model, batch(0))
    late = accelerator.prepare(make_optimizer(model))  # built from what the model shows between forward and backward
    held = {type(parameter).__name__ for group in late.param_groups for parameter in group["params"] if parameter.dim()}
    return shown, held


class Stumbling(nn.Module):
    """Raises in a forward, when it is computed again, or in a backward, when told."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
        self.head = nn.Linear(6, 6)
        self.at, self.forwards = None, 0

    def forward(self, x):
        self.forwards += 1
        for block in self.blocks:
            x = torch.tanh(block(x))
            if self.at == "forward" or (self.at == "recomputation" and self.forwards == 2):
                raise RuntimeError("stumbled")
            if self.at == "backward" and block is self.blocks[0]:
                x.register_hook(self.stumble)
        return self.head(x)

    def stumble(self, gradient):
        raise RuntimeError("stumbled")


def after_an_exception():
    """Gradients of a step after one that raised, in the forward, in the backward, or in a recomputation inside it."""
    found = {}
    for at in (None, "forward", "backward", "recomputation"):
        accelerator = Accelerator(strategy=FSDP(), cpu=True)
        model = accelerator.prepare(built(Stumbling))
        x = torch.arange(12.0).view(2, 6)[accelerator.process_index :][:1].sin()
        model.at = at
        call = partial(checkpoint, model, use_reentrant=False) if at == "recomputation" else model
        try:
            call(x).sum().backward()
        except RuntimeError as error:
            assert "stumbled" in str(error)
        model.at = None
        model.zero_grad()
        model(x).sum().backward()
        found[at] = [parameter.grad.full_tensor() for parameter in model.parameters()]
    return found


def computed_again():
    """Gradients where the whole model is computed again in the backward, which torch stops by an exception when it has enough."""
    accelerator = Accelerator(strategy=FSDP(), cpu=True)
    model = accelerator.prepare(built(Stumbling))
    x = torch.arange(12.0).view(2, 6)[accelerator.process_index :][:1].sin()
    found = []
    for call in (model, partial(checkpoint, model, use_reentrant=False)):
        for _ in range(2):
            model.zero_grad()
            call(x).sum().backward()
        found.append([parameter.grad.full_tensor() for parameter in model.parameters()])
    return found


def whole_parameters():
    """Gradients of parameters that are not cut, held back and sent."""
    accelerator = Accelerator(strategy=FSDP(ignored_modules=["head"]), cpu=True)
    model = accelerator.prepare(built(Net))
    x = torch.arange(12.0).view(2, 6)[accelerator.process_index :][:1].sin()
    with accelerator.no_sync(model):
        model(x).sum().backward()
    local = model.head.weight.grad.clone()
    model(2 * x).sum().backward()
    return (
        type(model.head.weight) is nn.Parameter,
        local,
        model.head.weight.grad,
        model.backbone.weight.grad.full_tensor(),
    )


def unfrozen():
    """A backbone that is unfrozen after it was prepared is trained like the rest."""
    accelerator = Accelerator(strategy=FSDP(wrap=["Linear"]), cpu=True)
    model = accelerator.prepare(built(FrozenBackbone))
    x = torch.arange(12.0).view(2, 6)[accelerator.process_index :][:1].sin()
    model(x).sum().backward()
    before = model.backbone.weight.grad
    model.zero_grad()
    model.requires_grad_(True)
    model(x).sum().backward()
    return before, model.backbone.weight.grad.full_tensor()


def in_bfloat16():
    """Losses computed in bfloat16, gathered in full and in bfloat16, and by a wrapper without shards."""
    return {
        "ddp": trained("ddp", mixed_precision=Narrow())[0],
        "gathered in full": trained(FSDP(gather_dtype=torch.float32), mixed_precision=Narrow())[0],
        "gathered as computed": trained(FSDP(), mixed_precision=Narrow())[0],
        "gathered in bfloat16": trained(FSDP(gather_dtype=torch.bfloat16), mixed_precision=Narrow())[0],
    }


def compiled():
    from accel_core import TorchDynamoPlugin

    found = {}
    for name, regional in (("whole", False), ("by blocks", True)):
        plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
        found[name] = trained(FSDP(), steps=2, dynamo_plugin=plugin)[:2]
        torch._dynamo.reset()
    return found


def refused():
    """What is raised for models that cannot be sharded, and copies of one that is."""
    from torch.distributed.fsdp import fully_shard

    def message(function, *args):
        try:
            function(*args)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"

    accelerator = Accelerator(strategy=FSDP(), cpu=True)
    sharded = accelerator.prepare(built(Net))
    mixed, strided, nested = built(Net), built(Net), nn.Sequential(sharded, nn.Linear(3, 3))
    mixed.head.bfloat16()
    strided.head.weight.data = torch.ones(8, 3).T
    return {
        "by torch": message(accelerator.prepare, fully_shard(built(Net), mesh=accelerator._layout.mesh)),
        "a part before": message(accelerator.prepare, nested),
        "several dtypes": message(accelerator.prepare, mixed),
        "columns": message(accelerator.prepare, strided),
        "no shape": message(accelerator.prepare, nn.Sequential(nn.LazyLinear(3))),
        "deepcopy": message(copy.deepcopy, sharded),
        "copy": message(copy.copy, sharded),
        "pickle": message(pickle.dumps, sharded),
    }


def two_models():
    """What explain() says of two models, and what is a model's class."""
    accelerator = Accelerator(strategy=FSDP(cpu_offload=True, gather_dtype=torch.bfloat16), cpu=True)
    first, _ = accelerator.prepare(built(Tiny), built(NormNet))
    return (
        type(first).__name__,
        type(first).__module__,
        str(accelerator.explain()),
        dict(accelerator._parts.strategy.details()),
    )


def travelled():
    """Gradients that travel as bfloat16, of cut parameters and of one that is whole."""
    accelerator = Accelerator(strategy=FSDP(), cpu=True, mixed_precision=Reduced())
    model = accelerator.prepare(built(Tiny))
    shard = accelerator._layout.shard
    accelerator.backward(loss_of(model, batch(0, shard.index, shard.count)))
    gradients = [model.temperature.grad, model.blocks[0].up.weight.grad.full_tensor()]
    return [torch.equal(gradient, gradient.bfloat16().float()) for gradient in gradients], model.temperature.grad


def recomputed():
    """How often a block ran in one step."""
    counts = []
    for recompute in (False, True):
        accelerator = Accelerator(strategy=FSDP(activation_checkpointing=recompute), cpu=True)
        model = accelerator.prepare(built(Tiny))
        accelerator.backward(loss_of(model, batch(0)))
        counts.append(model.blocks[0].seen)
    return counts


def two_ranks():
    facts = {f"strategy: {name}": trained(FSDP(**options)) for name, options in STRATEGIES.items()}
    facts["order: model first"] = trained(FSDP(), "model first")
    facts["order: built afterwards"] = trained(FSDP(), "built afterwards")
    jobs = (
        shown_after_an_evaluation,
        after_an_exception,
        computed_again,
        whole_parameters,
        unfrozen,
        in_bfloat16,
        compiled,
        refused,
    )
    facts.update((job.__name__, job()) for job in (*jobs, two_models, travelled, recomputed))
    facts["stepped: cut again"] = stepped_after_an_evaluation()
    facts["stepped: kept gathered"] = stepped_after_an_evaluation(reshard_after_forward=False)
    return facts


class Layers(nn.Sequential):
    """Two layers to be cut across and along, and one that is not."""

    def __init__(self):
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 3))


def across_and_along(folder):
    """The weights after two steps under FSDP of what tensor parallelism has cut; and when the second one follows a load."""
    plan = {"0": "colwise", "2": "rowwise"}
    found = []
    for seed in (0, 1):
        accelerator = Accelerator(strategy=FSDP(tensor_parallel=2, parallelize_plan=plan, wrap=["Linear"]), cpu=True)
        model = built(Layers, seed)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False))
        shard = accelerator._layout.shard
        if seed:
            accelerator.load_state(folder)
        for step in range(seed, 2):
            x = torch.arange(24.0).view(4, 6)[shard.index :: shard.count].sin() + step
            accelerator.backward(model(x).square().mean())
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            if not seed and not step:
                accelerator.save_state(folder)
        found.append((float(norm), accelerator.get_state_dict(model)))
    return found


def four_ranks(folder):
    facts = {f"strategy: {name}": trained(FSDP(**options)) for name, options in HYBRID.items()}
    return {**facts, "across and along": across_and_along(folder)}


@pytest.fixture(scope="module")
def facts():
    return run_ranks(two_ranks, 2, timeout=120)


@pytest.fixture(scope="module")
def facts_of_four(tmp_path_factory):
    return run_ranks(four_ranks, 4, str(tmp_path_factory.mktemp("four") / "state"), timeout=120)


def assert_same_training(found, expected, rank=0):
    losses, norms, state = found
    assert losses == pytest.approx(expected[0], rel=1e-6)
    assert norms == pytest.approx(expected[1], rel=1e-5)
    if rank == 0:
        assert list(state) == list(expected[2])
        for name, value in expected[2].items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


CASES = [*(f"strategy: {name}" for name in STRATEGIES), "order: model first", "order: built afterwards"]


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_one_process(facts, case):
    expected = reference()
    for rank, found in enumerate(facts):
        assert_same_training(found[case], expected, rank)


@pytest.mark.parametrize("case", [f"strategy: {name}" for name in HYBRID])
def test_training_on_replicas_of_shards_is_that_of_one_process(facts_of_four, case):
    expected = reference()
    for rank, found in enumerate(facts_of_four):
        assert_same_training(found[case], expected, rank)


def test_what_tensor_parallelism_has_cut_is_trained_saved_and_read_as_whole(facts_of_four):
    model = built(Layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        model(torch.arange(24.0).view(4, 6).sin() + step).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    (found_norm, state), (_, resumed) = facts_of_four[0]["across and along"]
    assert found_norm == pytest.approx(float(norm), rel=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
    assert {name: value.shape for name, value in resumed.items()} == {
        name: value.shape for name, value in state.items()
    }


@pytest.mark.parametrize("case", ["stepped: cut again", "stepped: kept gathered"])
def test_a_step_reaches_parameters_that_are_gathered_at_the_time(facts, case):
    model = built(Tiny)
    optimizer = make_optimizer(model)
    expected = []
    for step in range(3):
        loss = loss_of(model, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    for rank in facts:
        assert rank[case] == pytest.approx(expected, rel=1e-6)


def test_a_model_shows_its_parts_after_an_evaluation_and_optimizers_get_them(facts):
    for shown, held in (rank["shown_after_an_evaluation"] for rank in facts):
        assert shown == held == {"DTensor"}


def test_a_model_goes_on_after_an_exception(facts):
    for rank in facts:
        untroubled, *others = rank["after_an_exception"].values()
        for gradients in others:
            assert all(map(torch.equal, gradients, untroubled))


def test_a_model_that_is_computed_again_as_a_whole_has_the_same_gradients(facts):
    for usual, again in (rank["computed_again"] for rank in facts):
        assert all(map(torch.equal, usual, again))


def test_parameters_that_are_not_cut_are_averaged_when_the_others_are(facts):
    model = built(Net)
    x = torch.arange(12.0).view(2, 6).sin()
    ((model(x).sum() + model(2 * x).sum()) / 2).backward()
    for rank, (whole, local, head, backbone) in enumerate(each["whole_parameters"] for each in facts):
        assert whole
        torch.testing.assert_close(head, model.head.weight.grad)
        torch.testing.assert_close(backbone, model.backbone.weight.grad)
        alone = built(Net)
        alone(x[rank : rank + 1]).sum().backward()
        torch.testing.assert_close(local, alone.head.weight.grad)


def test_a_part_that_is_unfrozen_later_is_trained(facts):
    model = built(Net)
    (model(torch.arange(12.0).view(2, 6).sin()).sum() / 2).backward()
    for frozen, gradient in (rank["unfrozen"] for rank in facts):
        assert frozen is None
        torch.testing.assert_close(gradient, model.backbone.weight.grad)


def test_a_compute_dtype_gives_the_losses_of_ddp(facts):
    for losses in (rank["in_bfloat16"] for rank in facts):
        assert losses["gathered in full"] == pytest.approx(losses["ddp"], rel=1e-6)
        assert losses["gathered as computed"] == pytest.approx(losses["ddp"], rel=5e-3)
        assert losses["gathered in bfloat16"] == pytest.approx(losses["ddp"], rel=5e-3)
        assert losses["gathered in bfloat16"] != losses["ddp"]


@pytest.mark.parametrize("how", ["whole", "by blocks"])
def test_a_compiled_model_trains_as_it_would_uncompiled(facts, how):
    losses, norms, _ = reference(2)
    for rank in facts:
        assert rank["compiled"][how][0] == pytest.approx(losses, rel=1e-6)
        assert rank["compiled"][how][1] == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("by torch", "ValueError.*fully_shard has sharded already.*strategy=FSDP"),
        ("a part before", "ValueError.*'0' has been prepared by itself"),
        ("several dtypes", "ValueError.*torch.bfloat16: 'head.weight', 'head.bias'"),
        ("columns", "ValueError.*'head.weight'.*torch.contiguous_format"),
        ("no shape", "ValueError.*no shape yet: '0.weight', '0.bias'"),
        ("deepcopy", "TypeError.*was to be copied.*get_state_dict"),
        ("copy", "TypeError.*was to be copied or pickled.*get_state_dict"),
        ("pickle", "TypeError.*was to be copied or pickled.*save_model"),
    ],
)
def test_what_cannot_be_sharded_or_copied_is_refused_on_every_rank(facts, case, message):
    for rank in facts:
        assert re.match(message, rank["refused"][case])


def test_a_sharded_model_passes_for_its_class_and_is_explained(facts):
    name, module, explanation, details = facts[0]["two_models"]
    assert (name, module) == ("Tiny", Tiny.__module__)
    assert details == {
        "mesh": "shard 2 = 2 processes",
        "units": "3 × Block; 1 of 19 parameters are gathered with the whole model",
        "units of model 2": "none inside; 4 of 4 parameters are gathered with the whole model",
        "gathered": "bfloat16",
        "offload": "parts are in the memory of the host",
    }
    assert all(words in explanation for words in details.values())


def test_gradients_travel_in_the_dtype_that_the_precision_asks_for(facts):
    first, second = (rank["travelled"] for rank in facts)
    assert first[0] == second[0] == [True, True]
    assert torch.equal(first[1], second[1])


def test_what_a_unit_computed_is_computed_again_if_asked_for(facts):
    for rank in facts:
        assert rank["recomputed"] == [1, 2]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"replicate": 0}, ValueError, "replicate=0.*at least 1"),
        ({"tensor_parallel": True}, ValueError, "tensor_parallel=True"),
        ({"context_parallel": 1.5}, ValueError, "context_parallel=1.5"),
        ({"reshard_after_forward": 1}, ValueError, "reshard_after_forward=1.*at least 2"),
        ({"reshard_after_forward": "yes"}, ValueError, "reshard_after_forward='yes'"),
        ({"cpu_offload": "no"}, TypeError, "cpu_offload='no'.*True or False"),
        ({"activation_checkpointing": 1}, TypeError, "activation_checkpointing=1"),
        ({"reduce_unused_parameters": "no"}, TypeError, "reduce_unused_parameters='no'.*True or False"),
        ({"gather_dtype": "bf16"}, ValueError, "gather_dtype='bf16'.*torch.bfloat16"),
        ({"gather_dtype": torch.int8}, ValueError, "gather_dtype=torch.int8"),
        (
            {"reshard_after_forward": 2, "tensor_parallel": 2, "parallelize_plan": {"up": "colwise"}},
            ValueError,
            "cannot be kept in parts on fewer ranks",
        ),
    ],
)
def test_options_out_of_range_are_refused_at_once(options, error, message):
    with pytest.raises(error, match=message):
        FSDP(**options)


def test_a_number_of_ranks_that_does_not_divide_the_shards_is_refused():
    with pytest.raises(ValueError, match=r"1 ranks hold the shards, and 1 % 2 is 1"):
        Accelerator(strategy=FSDP(reshard_after_forward=2), cpu=True)
