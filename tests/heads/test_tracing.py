"""Tensors that are not just data: fake, traced, batched, dual. The fused paths must step aside."""

import io

import pytest
import torch
from cases import COMPILED, OPTIONS, make, slow
from cases_fresh import check_fresh, one_server
from torch.autograd.functional import jacobian

pytestmark = pytest.mark.parametrize("name", COMPILED)


def scores_for(name):
    head = make(name, 8)
    return head, torch.randn(3, head.num_scores)


def test_batched_gradients(name):
    head, scores = scores_for(name)
    scores.requires_grad_()
    out = head.log_probs(scores)
    weights = torch.randn(5, 3, 8)

    def pull(weight):
        return torch.autograd.grad(out, scores, weight, retain_graph=True)[0]

    want = torch.stack([pull(weight) for weight in weights])
    assert torch.allclose(torch.func.vmap(pull)(weights), want, atol=1e-4)
    batched = torch.autograd.grad(out, scores, weights, is_grads_batched=True, retain_graph=True)
    assert torch.allclose(batched[0], want, atol=1e-4)
    row = scores[0].detach()
    rows = jacobian(head.log_probs, row, vectorize=True)
    assert torch.allclose(rows, jacobian(head.log_probs, row), atol=1e-4)


class Policy(torch.nn.Module):
    """Probabilities and the likeliest category, as a policy would be deployed."""

    def __init__(self, name, K):
        super().__init__()
        self.head = make(name, K)

    def forward(self, scores):
        q = self.head(scores)
        return q.probs, q.mode


@pytest.mark.filterwarnings("ignore")  # of the tracer, and that there is a newer one
@pytest.mark.parametrize("K", [4, 5])
def test_traced_saved_and_loaded_it_gives_the_same_actions(name, K):
    policy = Policy(name, K)
    scores = torch.randn(100, policy.head.num_scores)
    traced = torch.jit.trace(policy, torch.zeros(3, policy.head.num_scores))
    assert "empty" not in str(traced.inlined_graph)  # memory that a kernel would have filled
    stream = io.BytesIO()
    torch.jit.save(traced, stream)
    stream.seek(0)
    probs, actions = torch.jit.load(stream)(scores)
    assert torch.allclose(probs, policy(scores)[0], atol=1e-6)
    assert torch.equal(actions, policy(scores)[1])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [False, True])
def test_exported_to_onnx_it_gives_the_same_actions(name, dynamo, tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    policy = Policy(name, 5).eval()
    path = str(tmp_path / "policy.onnx")
    scores = torch.randn(100, policy.head.num_scores)
    torch.onnx.export(policy, (torch.zeros_like(scores),), path, dynamo=dynamo, input_names=["s"])
    probs, actions = runtime.InferenceSession(path).run(None, {"s": scores.numpy()})
    assert torch.allclose(torch.from_numpy(probs), policy(scores)[0], atol=1e-5)
    assert torch.equal(torch.from_numpy(actions), policy(scores)[1])


@pytest.mark.parametrize("strict", [False, slow(True)])
def test_torch_export(name, strict):
    policy = Policy(name, 5)
    scores = torch.randn(3, policy.head.num_scores)
    exported = torch.export.export(policy, (torch.zeros_like(scores),), strict=strict)
    assert torch.allclose(exported.module()(scores)[0], policy(scores)[0], atol=1e-6)


@one_server
def test_compiled_divergence_in_a_fresh_process(name):
    head, options = OPTIONS.get(name, (name, {}))
    code = f"""
import torch
from catnat import make_head
from torch.distributions import kl_divergence
head = make_head({head!r}, 5, **{options!r})
scores = torch.randn(2, 3, head.num_scores)
loss = lambda a, b: kl_divergence(head(a), head(b)).sum()
got = torch.compile(loss, fullgraph=True, backend="aot_eager")(*scores)
assert torch.allclose(got, loss(*scores), rtol=1e-4), (got, loss(*scores))
"""
    check_fresh("-c", code)
