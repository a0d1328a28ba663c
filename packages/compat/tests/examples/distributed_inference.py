"""Prompts are divided over the processes, answers of unequal number are gathered in their order."""

import torch
from regression import parser

from accelerate import PartialState
from accelerate.utils import gather_object


def generate(args):
    distributed_state = PartialState(cpu=args.cpu)
    model = torch.nn.Embedding(32, 4).requires_grad_(False).to(distributed_state.device)
    prompts = [f"prompt {number}" for number in range(5)]
    completions = []
    with distributed_state.split_between_processes(prompts) as own:
        for prompt in own:
            model(torch.tensor([len(prompt)]))
            completions.append(f"{prompt}: answered")
    gathered = gather_object(completions)
    assert gathered == [f"prompt {number}: answered" for number in range(5)], gathered
    with distributed_state.split_between_processes(prompts, apply_padding=True) as padded:
        lengths = gather_object([len(padded)])
    assert len(set(lengths)) == 1, lengths
    distributed_state.print(f"{len(gathered)} answers of {distributed_state.num_processes} processes")
    distributed_state.destroy_process_group()


if __name__ == "__main__":
    generate(parser().parse_args())
