"""The fairest rival for the network: hand-tuned torch, clients stacked, factorised norms, two pinned processes.

    python torch_stacked.py B1 B2 [--seconds S]

Each process has one core and half of the clients, and takes STACK of them at a time through batched matrix
products. No autograd: the gradient of a two-layer network is written out, each example's norm from its factors,
noise drawn in place. Gradients, noise and products reuse their buffers.
"""

from __future__ import annotations

import os

import torch
import torch.multiprocessing as mp
import torch_common as common
import workloads

PROCESSES = 2
STACK = int(os.environ.get("STACK", "5"))  # clients at a time


def half(rank: int, w: workloads.Workload, stack: int, server, sums, go, done, count) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % os.cpu_count()]})
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    torch.set_grad_enabled(False)
    x, y = common.tensors(w)
    own = torch.arange(rank, w.clients, PROCESSES)
    x, y = x[own].contiguous(), torch.nn.functional.one_hot(y[own], w.classes).float()
    shapes = [value.shape for value in server]
    size = sum(value.numel() for value in server)
    flat, noise, gradient = (torch.empty(stack, size) for _ in range(3))

    def views(block):
        pieces = block.split([shape.numel() for shape in shapes], dim=1)
        return [piece.view(len(block), *shape) for piece, shape in zip(pieces, shapes, strict=True)]

    while True:
        go.wait()
        if count.value < 0:
            return
        for _ in range(count.value):
            start = torch.cat([value.reshape(-1) for value in server])
            total = torch.zeros(size)
            for first in range(0, len(own), stack):
                many = min(stack, len(own) - first)
                params, z, g = flat[:many], noise[:many], gradient[:many]
                params.copy_(start)
                w1, b1, w2, b2 = views(params)
                g1, h1, g2, h2 = views(g)
                here = torch.arange(many)[:, None]
                orders = torch.stack([common.batches(w) for _ in range(many)])
                for step in range(w.local_steps):
                    rows = orders[:, step]
                    xs, ys = x[first + here, rows], y[first + here, rows]
                    hidden = torch.baddbmm(b1[:, None], xs, w1).relu_()
                    d2 = torch.baddbmm(b2[:, None], hidden, w2).softmax(-1).sub_(ys)
                    d1 = torch.bmm(d2, w2.transpose(1, 2)).mul_(hidden > 0)
                    if w.clip:
                        squared = d1.square().sum(-1) * (1 + xs.square().sum(-1))
                        squared += d2.square().sum(-1) * (1 + hidden.square().sum(-1))
                        scale = (w.clip * squared.rsqrt()).clamp_(max=1.0)[..., None]
                        d1.mul_(scale)
                        d2.mul_(scale)
                    torch.bmm(xs.transpose(1, 2), d1, out=g1)
                    torch.sum(d1, 1, out=h1)
                    torch.bmm(hidden.transpose(1, 2), d2, out=g2)
                    torch.sum(d2, 1, out=h2)
                    params.sub_(g, alpha=w.lr / w.batch)
                    if w.step_noise:
                        params.add_(z.normal_(), alpha=-w.lr * w.step_noise)
                if w.param_clip:
                    params.mul_((w.param_clip / params.norm(dim=1, keepdim=True)).clamp_(max=1.0))
                if w.upload_noise:
                    params.add_(z.normal_(), alpha=w.upload_noise)
                total += params.sum(0)
            sums[rank].copy_(total)
            done.wait()  # both sums are there
            mean = sums.sum(0) / w.clients
            done.wait()  # both have read them
            if rank == 0:
                at = 0
                for value in server:
                    value.copy_(mean[at : at + value.numel()].view(value.shape))
                    at += value.numel()
            done.wait()
        go.wait()


def timed(w: workloads.Workload, seconds: float) -> None:
    context = mp.get_context("spawn")
    server = [torch.from_numpy(a).clone().share_memory_() for layer in workloads.initial(w) for a in layer]
    sums = torch.zeros(PROCESSES, w.num_params).share_memory_()
    go, done = context.Barrier(PROCESSES + 1), context.Barrier(PROCESSES)
    count = context.Value("i", 0)
    arguments = (w, STACK, server, sums, go, done, count)
    workers = [context.Process(target=half, args=(rank, *arguments)) for rank in range(PROCESSES)]
    for worker in workers:
        worker.start()

    def rounds(number):
        count.value = number
        go.wait()
        go.wait()

    def layers():
        arrays = [value.numpy().copy() for value in server]
        return list(zip(arrays[::2], arrays[1::2], strict=True))

    workloads.measure(w, "torch-stacked", common.versions(), rounds, layers, seconds=seconds, stack=STACK)
    count.value = -1
    go.wait()
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    workloads.each(timed)
