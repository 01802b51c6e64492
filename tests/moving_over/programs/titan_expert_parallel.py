"""A mixture of experts. Its experts are spread over ranks, by a style of the program's own, and the
rest of the model over the same ranks in another way: both meshes are views of one."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import (
    all_reduce,
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

WIDTH, EXPERTS, VOCABULARY, LENGTH, BATCH, STEPS = 16, 4, 24, 8, 8, 3
CASES = {
    2: {"ep": {"dp_shard": 2, "ep": 2}},
    4: {
        "ep": {"dp_shard": 4, "ep": 4},
        "ep+fsdp": {"dp_shard": 4, "ep": 2},
        "ep+hsdp": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    },
}


class ParallelDims:
    """Meshes by name. Each is cut from the mesh of the whole world when it is needed."""

    def __init__(self, *, dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1):
        self.dp_replicate, self.dp_shard, self.cp = dp_replicate, dp_shard, cp
        self.tp, self.pp, self.ep = tp, pp, ep
        self.world_size = dp_replicate * dp_shard * cp * tp * pp
        assert self.world_size == dist.get_world_size()
        self.meshes: dict[str, DeviceMesh] = {}
        self.build()

    def build(self):
        fsdp = self.dp_shard * self.cp
        efsdp = fsdp * self.tp // self.ep
        self.world = init_device_mesh("cpu", (self.world_size,), mesh_dim_names=("world",))
        views = {
            "data": {
                "pp": self.pp,
                "batch": self.dp_replicate * self.dp_shard,
                "cp": self.cp,
                "tp": self.tp,
            },
            "dense": {
                "pp": self.pp,
                "dp_replicate": self.dp_replicate,
                "fsdp": fsdp,
                "tp": self.tp,
            },
            "sparse": {
                "pp": self.pp,
                "dp_replicate": self.dp_replicate,
                "efsdp": efsdp,
                "ep": self.ep,
            },
        }
        self.views = {}
        for view, sizes in views.items():
            # Axes of one rank need no group of processes.
            # (Experts are sharded over one rank too.)
            unused = {n: "fake" for n, size in sizes.items() if size == 1 and n != "efsdp"}
            self.views[view] = self.world._unflatten(
                0, tuple(sizes.values()), tuple(sizes), backend_override=unused
            )
        data, dense, sparse = self.views.values()
        self.meshes = {name: data[name] for name in ("pp", "batch", "cp", "tp")}
        self.meshes |= {name: dense[name] for name in ("dp_replicate", "fsdp")}
        self.meshes |= {name: sparse[name] for name in ("efsdp", "ep")}
        self.meshes["loss"] = data["batch", "cp"]._flatten("loss_mesh")

    def get_mesh(self, *names):
        """Return a mesh of several axes, or None if all of them have one rank."""
        if all(self.meshes[name].size() == 1 for name in names):
            return None
        if len(names) == 1:
            return self.meshes[names[0]]
        for view in self.views.values():
            if set(names) <= set(view.mesh_dim_names):
                return view[names]
        raise KeyError(names)


class Experts(nn.Module):
    """Linear layers of several experts, for tokens sorted by expert."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * 0.2)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * 0.2)

    def forward(self, x, counts):
        w1, w2 = self.w1, self.w2
        if isinstance(w1, DTensor):
            w1, w2 = w1.to_local(), w2.to_local()
        parts = x.split(counts.tolist())
        outputs = [F.silu(part @ a) @ b for part, a, b in zip(parts, w1, w2, strict=True)]
        return torch.cat(outputs)


class MixtureOfExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x):
        tokens = x.reshape(-1, WIDTH)
        scores = self.router(tokens).softmax(-1)
        score, chosen = scores.max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=EXPERTS)
        outputs = self.experts(tokens[order], counts)
        back = torch.zeros_like(tokens).index_copy(0, order, outputs)
        return (back * score[:, None]).view(x.shape)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wv = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm, self.moe_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.moe = MixtureOfExperts()

    def forward(self, x):
        counts = torch.arange(1, x.shape[1] + 1)[:, None]
        x = x + self.wv(self.norm(x)).cumsum(1) / counts
        return x + self.moe(self.moe_norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(index): Block() for index in range(2)})
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


class ExpertParallel(ParallelStyle):
    """Each rank has some of the experts; tokens travel to them and back."""

    def _partition(self, name, module, mesh):
        for key, parameter in module.named_parameters(recurse=False):
            split = nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)]))
            module.register_parameter(key, split)

    def _dispatch(self, module, inputs, mesh):
        tokens, counts = inputs
        size = mesh.size()
        with torch.no_grad():
            received = all_to_all_single(counts, None, None, group=mesh.get_group())
            received = torch.ops._c10d_functional.wait_tensor(received)
            self.sent = counts.view(size, -1).sum(1).tolist()
            self.got = received.view(size, -1).sum(1).tolist()
        tokens = all_to_all_single_autograd(tokens, self.got, self.sent, mesh.get_group())
        # The tokens of each rank are sorted by expert: bring those of an expert together.
        experts = torch.arange(EXPERTS // size).repeat(size).repeat_interleave(received)
        self.order = experts.argsort(stable=True)
        return tokens[self.order], torch.bincount(experts, minlength=EXPERTS // size)

    def _combine(self, module, outputs, mesh):
        back = torch.zeros_like(outputs).index_copy(0, self.order, outputs)
        return all_to_all_single_autograd(back, self.sent, self.got, mesh.get_group())

    def _apply(self, module, device_mesh):
        return distribute_module(
            module,
            device_mesh,
            partition_fn=self._partition,
            input_fn=self._dispatch,
            output_fn=self._combine,
        )


def parallelize(model, dims):
    ep_mesh = dims.get_mesh("ep")
    names = ("dp_replicate", "fsdp") if dims.dp_replicate > 1 else ("fsdp",)
    dense_mesh = dims.get_mesh(*names)
    names = ("dp_replicate", "efsdp") if dims.dp_replicate > 1 else ("efsdp",)
    experts_mesh = dims.meshes["efsdp"] if len(names) == 1 else dims.get_mesh(*names)
    for block in model.layers.values():
        parallelize_module(block, ep_mesh, {"moe.experts": ExpertParallel()})
        experts = fully_shard(block.moe.experts, mesh=experts_mesh)
        # All ranks send tokens to an expert: its gradient is the mean over all of them.
        experts.set_gradient_divide_factor(dims.dp_replicate * dims.dp_shard)
        # Gloo cannot scale; but for one rank torch would then divide twice.
        experts.set_force_sum_reduction_for_comms(dims.meshes["efsdp"].size() > 1)
        fully_shard(block, mesh=dense_mesh)
    fully_shard(model, mesh=dense_mesh)


def make_model():
    torch.manual_seed(11)
    return Model()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def clip_grad_norm_(parameters, max_norm):
    """Clip by the norm over all parameters, which may be on several meshes."""
    by_mesh = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        by_mesh.setdefault(mesh, []).append(parameter)
    norms = []
    for group in by_mesh.values():
        grads = [parameter.grad for parameter in group]
        norm = nn.utils.get_total_norm(grads, 2.0, error_if_nonfinite=True, foreach=True)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.stack(norms).norm()
    for group in by_mesh.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, total, foreach=True)
    return total


def train(model, part, mean):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, part(batch(step)))
        loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        losses.append(mean(loss.detach()))
    results = {"losses": torch.stack(losses), "norms": torch.stack(norms)}
    for name, parameter in model.named_parameters():
        is_split = isinstance(parameter, DTensor)
        results[name] = parameter.full_tensor() if is_split else parameter.detach()
    return results


def train_on(dims):
    model = make_model()
    parallelize(model, dims)
    batch_mesh, loss_mesh = dims.get_mesh("batch"), dims.get_mesh("loss")

    def part(tokens):
        if batch_mesh is None:
            return tokens
        return tokens.chunk(batch_mesh.size())[batch_mesh.get_local_rank()]

    def mean(loss):
        if isinstance(loss, DTensor):
            loss = loss.full_tensor()
        if loss_mesh is None:
            return loss
        return all_reduce(loss, "sum", loss_mesh) / loss_mesh.size()

    return train(model, part, mean)


def run(folder):
    results = {}
    for case, sizes in CASES[dist.get_world_size()].items():
        found = train_on(ParallelDims(**sizes))
        results |= {f"{case}: {name}": value for name, value in found.items()}
    return results


def alone(size):
    found = train(make_model(), lambda tokens: tokens, lambda loss: loss)
    return {f"{case}: {name}": value for case in CASES[size] for name, value in found.items()}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name, value in run(None).items():
        if name.endswith("losses"):
            print(name, value.tolist())
    dist.destroy_process_group()
