"""A function that replays recorded operations in the place of its calls."""

from typing import Any

import torch

from megatron_moe.engine.cuda_graphs import CudaGraphs, GraphedCall
from tests.helpers.recorded_graphs import RecordedGraphs

MARK = "grad_added_to_main_grad"


class Scaled(torch.nn.Module):
    """A product that counts its inputs, and marks its weight as the engine's fused products do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.unused = (torch.nn.Parameter(torch.tensor([2.0, 3.0])) for _ in range(2))
        self.seen = torch.zeros(())

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> tuple[torch.Tensor, None, torch.Tensor]:
        self.seen += x.detach().sum()
        y = x * self.weight * factor
        if y.requires_grad:
            y.register_hook(lambda _: setattr(self.weight, MARK, True))
        return y, None, x.detach().argmax()


def test_a_call_replays_after_the_warm_up_and_captures_for_each_pass_in_flight_and_each_shape():
    made, beside, waited = RecordedGraphs(), list[int](), list[Any]()
    graphs, module = CudaGraphs(1, made), Scaled()
    hooks: dict[str, Any] = {"before_replay": waited.append, "beside_replay": lambda x: beside.append(len(x))}
    call, gradients = GraphedCall(graphs, module, [module], "pool", **hooks), list[torch.Tensor]()
    module.weight.register_hook(gradients.append)
    inputs = [torch.tensor(values, requires_grad=True) for values in ([1.0, 4.0], [5.0, 2.0], [3.0, 3.5])]
    for wanted in (0, 4, 4):
        module.seen.zero_()
        module.weight.grad = None
        with graphs.step():
            passes = [call(x) for x in inputs[:2]]
            for x, (y, nothing, largest) in zip(inputs, passes):
                assert nothing is None and not largest.requires_grad and largest == x.argmax()
                assert y.tolist() == (x * module.weight).tolist()
                setattr(module.weight, MARK, False)
                x.grad = None
                y.backward(torch.tensor([1.0, -1.0]))
                assert x.grad.tolist() == [2.0, -3.0] and getattr(module.weight, MARK)
        assert (len(made), float(module.seen), module.unused.grad) == (wanted, 12.0, None)
    assert len(gradients) == 6  # not of a capture
    assert len({one.pool for one in made}) == 2 and beside == [2, 2] and waited == [module] * 4
    with graphs.step():
        wide = call(inputs[2].expand(3, 2))[0]
        assert len(made) == 6 and wide.tolist() == (inputs[2] * module.weight).expand(3, 2).tolist()
        assert call(inputs[2], factor=2.0)[0].tolist() == (2 * inputs[2] * module.weight).tolist() and len(made) == 8
    with graphs.step(eager=True):
        call(inputs[0])
    with graphs.step(), torch.no_grad():
        call(inputs[0])
    call(inputs[0])
    assert len(made) == 8
    sending = GraphedCall(graphs, module, [module], "pool", copies=True)
    with graphs.step():
        sent = [sending(x)[0] for x in inputs[:1]]
        sent[0].sum().backward()
        sending(inputs[1])
    assert len(made) == 10 and sent[0].tolist() == (inputs[0] * module.weight).tolist()
