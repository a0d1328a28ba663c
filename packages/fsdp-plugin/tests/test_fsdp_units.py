"""Units: which modules are gathered at a time, and that shared parameters stay shared and train."""

import copy

import pytest
import torch
from torch import nn

from accel_core import World
from accel_fsdp.wrapping import check_wrap, describe_units, find_units, ignored_parameters
from accel_testing import run_ranks


class Block(nn.Module):
    def __init__(self, width, norm=None):
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm is None else norm
        self.feed = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x):
        return x + self.feed(self.norm(x))


class Language(nn.Module):
    """A little language model, whose embedding is its head unless it is untied."""

    def __init__(self, width=4, depth=2, tied=True, norm=None, repeated=False):
        super().__init__()
        self.embed = nn.Embedding(6, width)
        block = Block(width, norm)
        self.blocks = nn.ModuleList(block if repeated else Block(width, norm) for _ in range(depth))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


def untied():
    return Language(tied=False)


def names(model, units):
    """Units by the names of their modules; those that are gathered together joined by a plus."""
    of = {module: name for name, module in model.named_modules()}
    return ["+".join(of[each] for each in (unit if isinstance(unit, list) else [unit])) for unit in units]


def found(model, *args, **kwargs):
    return names(model, find_units(model, *args, **kwargs))


def test_without_a_policy_units_are_the_outermost_repeated_blocks():
    assert found(Language()) == ["blocks.0", "blocks.1"]
    assert found(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU())) == ["0", "2"]
    assert found(nn.Linear(2, 2)) == []


def test_members_that_differ_are_searched_for_what_they_repeat():
    stages = nn.ModuleList([nn.Sequential(Block(2), Block(2)), nn.Linear(2, 2), nn.ModuleList([Block(2), Block(2)])])
    assert found(nn.Sequential(stages)) == ["0.0.0", "0.0.1", "0.2.0", "0.2.1"]


def test_lists_of_lists_are_no_units_but_their_blocks_are():
    model = nn.Module()
    model.levels = nn.ModuleList(nn.ModuleList([Block(2), Block(2)]) for _ in range(2))
    assert found(model) == ["levels.0.0", "levels.0.1", "levels.1.0", "levels.1.1"]


def test_units_by_class_come_inner_ones_first():
    every = ["blocks.0.norm", "blocks.0", "blocks.1.norm", "blocks.1", "last"]
    assert found(untied(), ["Block", "LayerNorm"]) == found(untied(), "Block, LayerNorm") == every


def test_a_subclass_goes_by_the_name_of_its_class():
    class Converted(Block):
        pass

    model = nn.Sequential(Converted(2), nn.Linear(2, 2))
    assert found(model, "Block") == found(model, "Converted") == ["0"]


def test_units_by_size_are_the_smallest_that_are_large_enough():
    # A block has 48 parameters, 20 in each of its layers and 8 in its norm; embedding and head 24, the norm in the end 8.
    assert found(untied(), 24) == ["embed", "blocks.0.feed", "blocks.1.feed", "head"]
    assert found(untied(), 41) == ["blocks.0", "blocks.1"]
    assert found(untied(), 10_000) == []


def test_units_by_function_and_none_at_all():
    asked = []
    assert found(untied(), lambda module, name: asked.append(name) or name.endswith("1")) == ["blocks.1"]
    assert "" not in asked
    assert found(untied(), "none") == []


def test_a_class_that_the_model_lacks_is_refused_with_its_own_nearest_first():
    with pytest.raises(
        ValueError, match=r"names the class 'Blok'.*Language has no module.*modules of 'Block', "
    ) as caught:
        find_units(Language(), ["LayerNorm", "Blok"])
    assert "ReLU" not in str(caught.value)  # has no parameters


def test_modules_without_parameters_are_no_units():
    model = nn.Sequential(nn.ReLU(), nn.ReLU(), nn.Linear(2, 2))
    assert found(model) == found(model, "ReLU") == []


@pytest.mark.parametrize("wrap", ["ModuleList", lambda module, name: name == "blocks"])
def test_a_list_of_modules_is_refused_because_it_is_never_called(wrap):
    with pytest.raises(ValueError, match=r"chooses 'blocks', a ModuleList, which has no forward.*members, of 'Block'"):
        find_units(Language(), wrap)


@pytest.mark.parametrize("wrap", [0, -1, [], "", " , "])
def test_a_policy_that_chooses_nothing_is_refused(wrap):
    with pytest.raises(ValueError, match="chooses nothing"):
        check_wrap(wrap)


@pytest.mark.parametrize("wrap", [True, 1.5, Block, [Block], {"Block": 1}])
def test_a_policy_of_another_type_is_refused(wrap):
    with pytest.raises(TypeError, match=r"FSDP\(wrap=.*names of classes"):
        check_wrap(wrap)


def test_ignored_modules_are_no_units_and_their_parameters_are_told():
    model = untied()
    inside = set(model.blocks[0].parameters())
    for ignored in ([model.blocks[0]], ["blocks.0"], ["*.0"], lambda module, name: name == "blocks.0"):
        assert found(model, None, ignored) == ["blocks.1"]
        assert ignored_parameters(model, ignored) >= inside
    assert ignored_parameters(model, ["blocks.0"]) == inside
    assert ignored_parameters(model) == set()


def test_an_ignored_module_that_the_model_lacks_is_refused():
    with pytest.raises(ValueError, match=r"pattern 'heads', which matches no module of Language. It has 'head', "):
        ignored_parameters(Language(), ["heads"])
    with pytest.raises(ValueError, match="has a LayerNorm that is no module of Language, or is none any more"):
        ignored_parameters(Language(), [nn.LayerNorm(4)])
    with pytest.raises(TypeError, match=r"ignored_modules='head'\) is a str"):
        ignored_parameters(Language(), "head")


def test_a_tied_embedding_and_head_are_gathered_with_the_model_unless_wrapped():
    assert found(Language()) == ["blocks.0", "blocks.1"]
    assert found(Language(), ["Embedding"]) == ["embed+head"]
    assert found(Language(), ["Embedding", "Block", "Language"]) == ["blocks.0", "blocks.1", "embed+head"]
    assert found(Language(), 24) == ["blocks.0.feed", "blocks.1.feed", "embed+head"]


def test_units_that_share_a_parameter_are_gathered_together():
    model = Language(depth=3)
    model.blocks[2].feed[0].weight = model.blocks[0].feed[0].weight
    assert found(model) == ["blocks.1", "blocks.0+blocks.2"]
    model.blocks[1].feed[2].weight = model.blocks[0].feed[0].weight
    assert found(model) == ["blocks.0+blocks.1+blocks.2"]


def test_a_unit_inside_another_one_that_shares_with_the_outside_becomes_part_of_it():
    model = untied()
    model.blocks[1].norm.weight = model.blocks[0].norm.weight
    assert found(model, ["Block", "LayerNorm"]) == ["blocks.0+blocks.1", "last"]


def test_a_unit_that_shares_with_the_model_itself_is_gathered_with_it():
    model = untied()
    model.scale = model.blocks[0].norm.weight
    model.blocks[1].norm.bias = model.blocks[0].norm.bias
    assert found(model) == []
    model.head.weight = model.embed.weight
    model.weight = model.embed.weight
    assert found(model, ["Embedding", "Linear"]) == [
        f"blocks.{block}.feed.{layer}" for block in (0, 1) for layer in (0, 2)
    ]


def test_a_module_that_occurs_in_several_units_is_one_of_its_own():
    assert found(Language(norm=nn.LayerNorm(4))) == ["blocks.0.norm", "blocks.0", "blocks.1"]
    assert found(Language(repeated=True)) == ["blocks.0"]


def test_units_are_described_in_words():
    model = Language()
    described = describe_units(model, find_units(model, ["Block", "Embedding"]))
    assert described == "2 × Block, 1 × Embedding with Linear; 2 of 15 parameters are gathered with the whole model"
    ignored = ignored_parameters(model, ["last"])
    assert describe_units(model, [], ignored) == "none inside; 13 of 13 parameters are gathered with the whole model"


def tied_to_a_block():
    model = Language(depth=3)
    model.blocks[2].feed[0].weight = model.blocks[0].feed[0].weight
    return model


CASES = {
    "tied, gathered with the model": (Language, None),
    "tied, gathered together": (Language, ["Embedding", "Block"]),
    "tied, by size": (Language, 24),
    "blocks that share a parameter": (tied_to_a_block, None),
    "blocks that share a module": (lambda: Language(norm=nn.LayerNorm(4)), None),
    "one block several times": (lambda: Language(depth=3, repeated=True), None),
    "nested": (Language, ["Block", "LayerNorm", "Linear"]),
}


def losses(model, batches, mean=lambda loss: loss):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for tokens in batches:
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(mean(loss.detach()).item())
    return found


def sharded_like_whole(case):
    """Losses of a whole model over whole batches, and of its sharded copy over this rank's halves; and how many are tied."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from accel_fsdp.mesh import Meshes

    world = World.current(cpu=True)
    meshes = Meshes.build(world)

    def mean(loss):
        dist.all_reduce(loss, group=meshes.data_group)
        return loss / world.size

    factory, wrap = CASES[case]
    torch.manual_seed(3)
    whole = factory()
    model = copy.deepcopy(whole)
    batches = torch.randint(6, (4, 2, 5))
    for unit in find_units(model, wrap):
        fully_shard(unit, mesh=meshes.fsdp)
    fully_shard(model, mesh=meshes.fsdp)
    halves = [batch[world.rank : world.rank + 1] for batch in batches]
    found = losses(model, halves, mean), losses(whole, batches)
    every = [len(dict(each.named_parameters(remove_duplicate=double))) for each in (model, whole) for double in (0, 1)]
    return *found, every[:2], every[2:]


def all_cases():
    return {case: sharded_like_whole(case) for case in CASES}


@pytest.fixture(scope="module")
def trained():
    return run_ranks(all_cases, 2)


@pytest.mark.parametrize("case", CASES)
def test_shared_parameters_stay_shared_and_train_as_in_one_process(trained, case):
    for rank in range(2):
        sharded, whole, ties, ties_before = trained[rank][case]
        assert ties == ties_before
        assert sharded == pytest.approx(whole, abs=1e-6)
        assert whole[-1] < whole[0]
