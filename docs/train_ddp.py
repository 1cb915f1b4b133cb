"""The smallest complete script for DistributedDataParallel: what notebook 03 takes apart, put together to take home.

    torchrun --nproc-per-node 2 train_ddp.py

on a laptop; on a node with eight GPUs with `--nproc-per-node 8`. It uses a GPU per process where there are enough.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun sets it, with RANK and WORLD_SIZE
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)  # before the first collective
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)  # data: the same on every rank
    x = torch.randn(256, 20)
    data = TensorDataset(x, x[:, :3].argmax(1))
    sampler = DistributedSampler(data)  # each rank's own part of every epoch
    loader = DataLoader(data, batch_size=16, sampler=sampler)

    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3)).to(device)
    model = DDP(model, device_ids=[local_rank] if on_gpu else None, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + rank)  # from here on dropout, if there is any, is to differ

    for epoch in range(3):
        sampler.set_epoch(epoch)  # or every epoch is dealt alike
        total = torch.zeros(2, device=device)  # sum of the losses, number of samples
        for inputs, labels in loader:
            inputs, labels = inputs.to(device), labels.to(device)
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()  # gradients are averaged over the ranks meanwhile
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # after the reduction: the same norm everywhere
            optimizer.step()
            total += torch.stack([loss.detach() * len(labels), torch.tensor(float(len(labels)), device=device)])
        dist.all_reduce(total)  # a number for the log is to be everybody's
        if rank == 0:
            print(f"epoch {epoch}: loss {total[0] / total[1]:.3f} over {total[1]:.0f} samples")

    if rank == 0:  # DDP: rank 0 has everything (under FSDP it would not)
        torch.save(model.module.state_dict(), "model.pt")  # .module: names without DDP's prefix
    dist.barrier()  # nobody leaves before the file is there
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
