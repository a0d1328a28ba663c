"""Folds one after the other with one Accelerator, predictions of each fold gathered and averaged over the folds."""

import torch
import torch.nn.functional as F
from regression import model_and_optimizer, parser
from torch.utils.data import DataLoader, Subset, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed


def training_function(args):
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    set_seed(42)
    inputs = torch.linspace(-1, 1, 45)[:, None]
    data, held = TensorDataset(inputs, 2 * inputs + 3), TensorDataset(inputs[:13], 2 * inputs[:13] + 3)
    test_dataloader = accelerator.prepare(DataLoader(held, batch_size=4))
    test_predictions = []
    for fold in range(3):
        kept = [index for index in range(len(data)) if index % 3 != fold]
        left = [index for index in range(len(data)) if index % 3 == fold]
        train_dataloader = DataLoader(Subset(data, kept), batch_size=4, shuffle=True)
        eval_dataloader = DataLoader(Subset(data, left), batch_size=4)
        model, optimizer = model_and_optimizer()
        model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
            model, optimizer, train_dataloader, eval_dataloader
        )
        for inputs, targets in train_dataloader:
            loss = F.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        seen = 0
        for inputs, targets in eval_dataloader:
            with torch.no_grad():
                _, references = accelerator.gather_for_metrics((model(inputs), targets))
            seen += len(references)
        assert seen == len(left), (seen, len(left))
        fold_predictions = []
        for inputs, _ in test_dataloader:
            with torch.no_grad():
                fold_predictions.append(accelerator.gather_for_metrics(model(inputs)).cpu())
        test_predictions.append(torch.cat(fold_predictions))
        assert len(test_predictions[-1]) == len(held), len(test_predictions[-1])
        model, optimizer, train_dataloader, eval_dataloader = accelerator.free_memory(
            model, optimizer, train_dataloader, eval_dataloader
        )
    mean = torch.stack(test_predictions).mean(0)
    accelerator.print(f"{len(mean)} predictions of {len(test_predictions)} folds")
    accelerator.end_training()


if __name__ == "__main__":
    training_function(parser().parse_args())
