"""The output layer on two ranks: two real processes with gloo find what one process finds.

The file is also the program of a rank: ``python test_layer_ranks.py RANK FOLDER``.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases_fresh import Fresh, one_server
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from catnat import TreeLinear

K, WIDTH, ROWS = 300, 6, 8
pytestmark = one_server


class Model(nn.Module):
    """A network that ends in an output layer, and its loss."""

    def __init__(self, sparse=False):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(WIDTH, WIDTH)
        order = torch.randperm(K)
        self.output = TreeLinear(WIDTH, K, order=order, frequent=20, sparse=sparse)

    def forward(self, states, target):
        return self.output(self.body(states), target)


class Parallel(nn.Module):
    """The output layer of a rank that owns one of the two subtrees below the root.

    Root and shortlist are on both ranks. A subtree is a layer of its own.
    """

    def __init__(self, whole, rank):
        super().__init__()
        self.rank, self.half = rank, (whole.num_categories - whole.num_frequent) // 2
        self.whole = whole  # for the places of classes, the root and the shortlist
        own, level = [], 2
        while level <= self.half:  # heap numbers level + rank level / 2 ... at each level
            own += range(level + rank * level // 2, level + (rank + 1) * level // 2)
            level *= 2
        self.own = torch.tensor(own) - 1
        self.subtree = TreeLinear(WIDTH, self.half, dtype=whole.weight.dtype)
        self.subtree.weight.data = whole.weight.data[self.own].clone()
        self.subtree.bias.data = whole.bias.data[self.own].clone()
        self.messages = []

    def nll(self, hidden, target):
        leaf = self.whole._places(target) - self.whole.num_frequent
        is_right = leaf >= self.half
        mine = (leaf >= 0) & (is_right == self.rank)
        logs = torch.zeros(len(hidden), dtype=hidden.dtype)
        states = Copied.apply(hidden, self.messages)
        below = self.subtree.log_prob(states[mine], leaf[mine] - self.rank * self.half)
        logs = Summed.apply(logs.masked_scatter(mine, below), self.messages)
        score = hidden @ self.whole.weight[0] + self.whole.bias[0]
        root = nn.functional.logsigmoid(torch.where(is_right, score, -score))
        column = self.whole._places(target).clamp(0, self.whole.num_frequent)
        block = self.whole._block(hidden).gather(1, column[:, None])[:, 0]
        return -(block + torch.where(leaf >= 0, root + logs, 0.0)).mean()


class Summed(torch.autograd.Function):
    """The sum over ranks; its gradient is that of each part."""

    @staticmethod
    def forward(ctx, x, messages):
        messages.append(("forward", x.numel()))
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Copied(torch.autograd.Function):
    """The same on each rank; gradients are summed."""

    @staticmethod
    def forward(ctx, x, messages):
        ctx.messages = messages
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.messages.append(("backward", grad.numel()))
        dist.all_reduce(grad := grad.clone())
        return grad, None


def whole_layer():
    torch.manual_seed(2)
    return TreeLinear(WIDTH, 20 + 256, order=torch.randperm(276), frequent=20, dtype=torch.float64)


def words():
    torch.manual_seed(3)
    return torch.randn(40, WIDTH, dtype=torch.float64), torch.randint(276, (40,))


def data():
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH), torch.randint(K, (ROWS,))


def gradients(model):
    """All gradients, dense and whole."""
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.to_dense()
        found[name] = whole.clone()
    return found


def work(rank, folder):
    """What a rank does: results are saved as ``NAME-RANK.pt``."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2
    )
    share = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
    states, target = (x[share] for x in data())

    def save(name, values):
        torch.save(values, folder / f"{name}-{rank}.pt")

    for sparse in (False, True):
        model = Model(sparse)
        shared = DistributedDataParallel(model)
        shared(states, target).backward()
        assert model.output.weight.grad.is_sparse == sparse
        save(f"ddp-{sparse}", gradients(model))

    model = Model()
    mesh = init_device_mesh("cpu", (2,))
    for part in (model.output, model):
        fully_shard(part, mesh=mesh)
    for method in ("nll", "sample", "topk", "log_probs"):
        register_fsdp_forward_method(model.output, method)
    model(states, target).backward()
    hidden = data()[0]
    found = {
        "nll": model.output.nll(*data()).detach(),
        "log_probs": model.output.log_probs(hidden).detach(),
        "topk": model.output.topk(hidden, 3).indices,
        "sample": model.output.sample(hidden, (500,), torch.Generator().manual_seed(3)),
    }
    save("fsdp", gradients(model) | found)

    dcp.save(get_model_state_dict(model), checkpoint_id=folder / "checkpoint")
    other = Model()
    other.output.set_order(None)
    nn.init.zeros_(other.output.weight)
    other.output.sample(hidden)  # which keeps what it derives from the order
    fully_shard(other.output, mesh=mesh)
    dcp.load(get_model_state_dict(other), checkpoint_id=folder / "checkpoint")
    register_fsdp_forward_method(other.output, "log_probs")
    register_fsdp_forward_method(other.output, "sample")
    loaded = {
        "log_probs": other.output.log_probs(hidden).detach(),
        "sample": other.output.sample(hidden, (500,), torch.Generator().manual_seed(3)),
    }
    save("loaded", loaded)

    parallel = Parallel(whole_layer(), rank)
    hidden, target = words()
    loss = parallel.nll(hidden.requires_grad_(), target)
    loss.backward()
    found = {
        "loss": loss.detach(),
        "hidden": hidden.grad,
        "subtree": parallel.subtree.weight.grad,
        "bias": parallel.subtree.bias.grad,
        "own": parallel.own,
        "root": parallel.whole.weight.grad[0],
        "shortlist": parallel.whole.shortlist.weight.grad,
        "messages": parallel.messages,
    }
    save("parallel", found)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two ranks left."""
    folder = tmp_path_factory.mktemp("ranks")
    processes = [Fresh(__file__, rank, folder) for rank in range(2)]
    for process in processes:
        done = process.wait(120)
        assert done.returncode == 0, done.stderr[-3000:]
    return folder


def results(folder, name):
    return [torch.load(folder / f"{name}-{rank}.pt") for rank in range(2)]


def one_process():
    model = Model()
    model(*data()).backward()
    return model


@pytest.mark.parametrize("sparse", [False, True])
def test_data_parallel_gradients_are_those_of_one_process(folder, sparse):
    expected = gradients(one_process())
    for found in results(folder, f"ddp-{sparse}"):
        torch.testing.assert_close(found, expected)


def test_sharded_parameters_give_the_gradients_and_classes_of_one_process(folder):
    model = one_process()
    hidden = data()[0]
    expected = gradients(model)
    expected["nll"] = model.output.nll(*data()).detach()
    expected["log_probs"] = model.output.log_probs(hidden).detach()
    expected["topk"] = model.output.topk(hidden, 3).indices
    expected["sample"] = model.output.sample(hidden, (500,), torch.Generator().manual_seed(3))
    for found in results(folder, "fsdp"):
        torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_two_ranks_restores_weights_and_order_in_place(folder):
    hidden = data()[0]
    layer = Model().output
    expected = {
        "log_probs": layer.log_probs(hidden).detach(),
        "sample": layer.sample(hidden, (500,), torch.Generator().manual_seed(3)),
    }
    for found in results(folder, "loaded"):
        torch.testing.assert_close(found, expected)
    one = Model()
    one.output.set_order(None)
    nn.init.zeros_(one.output.weight)
    dcp.load(one.state_dict(), checkpoint_id=folder / "checkpoint")
    torch.testing.assert_close(one.output.log_probs(hidden).detach(), expected["log_probs"])


def test_ranks_that_own_subtrees_find_what_one_process_finds_with_two_messages(folder):
    layer = whole_layer()
    hidden, target = words()
    loss = layer.nll(hidden.requires_grad_(), target)
    loss.backward()
    owned = [0]
    for found in results(folder, "parallel"):
        torch.testing.assert_close(found["loss"], loss.detach())
        torch.testing.assert_close(found["hidden"], hidden.grad)
        torch.testing.assert_close(found["subtree"], layer.weight.grad[found["own"]])
        torch.testing.assert_close(found["bias"], layer.bias.grad[found["own"]])
        torch.testing.assert_close(found["root"], layer.weight.grad[0])
        torch.testing.assert_close(found["shortlist"], layer.shortlist.weight.grad)
        assert found["messages"] == [("forward", 40), ("backward", 40 * WIDTH)]
        owned += found["own"].tolist()
    assert sorted(owned) == list(range(255))


if __name__ == "__main__":
    torch.set_num_threads(1)
    work(int(sys.argv[1]), Path(sys.argv[2]))
