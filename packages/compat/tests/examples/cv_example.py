"""Pictures of four classes: a frozen backbone behind a trained head, OneCycleLR, normalisation on the device, evaluation."""

import argparse

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator
from accelerate.utils import set_seed


class PetsDataset(Dataset):
    def __init__(self, rows, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 4, (rows,), generator=generator)
        self.images = torch.randn(rows, 3, 8, 8, generator=generator)
        for image, label in zip(self.images, self.labels, strict=True):
            image[0] += float(label) * 2

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, idx):
        return {"image": self.images[idx], "label": int(self.labels[idx])}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.fc = nn.Linear(8 * 36, 4)
        self.register_buffer("mean", torch.zeros(1, 3, 1, 1))

    def forward(self, images):
        return self.fc(self.backbone(images))


def training_function(config, args):
    if args.with_tracking:
        accelerator = Accelerator(
            cpu=args.cpu, mixed_precision=args.mixed_precision, log_with="all", project_dir=args.project_dir
        )
    else:
        accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    set_seed(config["seed"])
    train_dataloader = DataLoader(PetsDataset(120, 1), shuffle=True, batch_size=config["batch_size"], num_workers=0)
    eval_dataloader = DataLoader(PetsDataset(37, 2), shuffle=False, batch_size=config["batch_size"], num_workers=0)
    model = Net().to(accelerator.device)
    for param in model.parameters():
        param.requires_grad = False
    for param in model.fc.parameters():
        param.requires_grad = True
    mean = torch.tensor([3.0, 0.0, 0.0])[None, :, None, None].to(accelerator.device)
    optimizer = torch.optim.Adam(
        params=[each for each in model.parameters() if each.requires_grad], lr=config["lr"] / 25
    )
    lr_scheduler = OneCycleLR(
        optimizer=optimizer, max_lr=config["lr"], epochs=config["num_epochs"], steps_per_epoch=len(train_dataloader)
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    for epoch in range(config["num_epochs"]):
        model.train()
        for batch in train_dataloader:
            batch = {k: v.to(accelerator.device) for k, v in batch.items()}
            outputs = model(batch["image"] - mean)
            loss = torch.nn.functional.cross_entropy(outputs, batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        model.eval()
        accurate = num_elems = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(batch["image"] - mean).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["label"]))
            accurate_preds = predictions == references
            num_elems += accurate_preds.shape[0]
            accurate += accurate_preds.long().sum().item()
        accelerator.print(f"epoch {epoch}: {num_elems} samples, accuracy {accurate / num_elems:.3f}")
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", type=str, default=None)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--with_tracking", action="store_true")
    parser.add_argument("--project_dir", type=str, default="logs")
    args = parser.parse_args()
    training_function({"lr": 3e-2, "num_epochs": 2, "seed": 42, "batch_size": 8}, args)


if __name__ == "__main__":
    main()
