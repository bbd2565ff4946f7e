"""Common subexpressions of a traced step: shared where that changes nothing, and left where it would."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from shoal.engines.batched.fx_cse import share_subexpressions

X = torch.arange(6.0).view(2, 3)


def share(function, *example: torch.Tensor):
    """The traced function after sharing, and how many operations of each kind are left."""
    module = make_fx(function)(*example)
    module.graph = share_subexpressions(module.graph)
    module.graph.lint()
    names = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
    return module, {name: names.count(name) for name in names}


def test_what_is_computed_twice_is_computed_once():
    module, counts = share(lambda x: ((x.sin() + 1).sum((0, 1)) * (x.sin() + 1).sum((0, 1)),), X)
    assert counts == {"aten.sin.default": 1, "aten.add.Tensor": 1, "aten.sum.dim_IntList": 1, "aten.mul.Tensor": 1}
    assert module(X)[0] == (X.sin() + 1).sum() ** 2


def test_numbers_of_another_type_or_sign_are_not_the_same():
    functions = [lambda x: x * 1, lambda x: x * 1.0, lambda x: x * True, lambda x: x + 0.0, lambda x: x + -0.0]
    _, counts = share(lambda x: torch.stack([f(x) for f in functions]).sum(), X)
    assert counts["aten.mul.Tensor"] == 3
    assert counts["aten.add.Tensor"] == 2


def test_random_and_uninitialised_numbers_are_drawn_as_often_as_before():
    def draw(x):
        return (torch.rand_like(x) + torch.rand_like(x)).sum(), torch.empty(2) is torch.empty(2)

    _, counts = share(draw, X)
    assert counts["aten.rand_like.default"] == 2


def test_two_results_never_become_one_tensor():
    module, counts = share(lambda x: (x * 2, x * 2, (x + 3).view(-1), (x + 3).view(-1)), X)
    results = module(X)
    assert counts["aten.mul.Tensor"] == 2 and len({r.untyped_storage().data_ptr() for r in results}) == 4
    assert torch.equal(results[0], results[1]) and torch.equal(results[2], results[3])


def test_a_program_that_overwrites_stays_as_it_is():
    def overwrite(x):
        y = x * 2
        y.add_(1)
        return y.sum() + (x * 2).sum()

    module, counts = share(overwrite, X)
    assert counts["aten.mul.Tensor"] == 2
    assert module(X) == (X * 2 + 1).sum() + (X * 2).sum()
