"""Ask both devices the same things, forward and backward, and print as JSON which answers are the same bits.

A process of its own: a PrivateUse1 backend, once registered, stays for the process's life.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from nonet.workers.devices.vendors import get_device

X = torch.linspace(-2, 3, 12).view(4, 3)
HEADS = torch.sin(torch.arange(160.0)).view(2, 2, 5, 8)


def written_view(x: Tensor) -> Tensor:
    z = x.clone()
    z[1:, 1] = 0
    z.view(3, 4).t()[2] *= 2
    return z


def foreach(x: Tensor) -> Tensor:
    moved = [x.detach().clone()]
    torch._foreach_lerp_(moved, [x.detach() * 2], 0.3)
    torch._foreach_addcdiv_(moved, moved, [moved[0].abs() + 1], value=-0.1)
    return moved[0] + x


def mask(size: int, x: Tensor) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool, device=x.device).tril()


def dropped(x: Tensor) -> Tensor:
    get_device(x.device.type).seed(3)
    return functional.dropout(x, 0.5)


def autocast(x: Tensor) -> Tensor:
    x = (
        x * 1
    )  # not a leaf: of leaves torch's own devices keep one half copy, and sum its gradients in half precision
    with get_device(x.device.type).autocast("bf16"):
        return functional.linear(x, x) + (x @ x.mT)


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "layer_norm": (lambda x: functional.layer_norm(x, (3,)), X),
    "attention_causal": (
        lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True),
        HEADS,
    ),
    "attention_masked": (
        lambda x: functional.scaled_dot_product_attention(x, x, x, attn_mask=mask(5, x)),
        HEADS,
    ),
    "gather": (lambda x: x.index_select(0, torch.tensor([1, 1, 2], device=x.device)), X),
    "index": (lambda x: x[torch.tensor([1, 1, 2], device=x.device)] * 2, X),
    "boolean": (lambda x: x[x > 0].cumsum(0), X),
    "transposed": (lambda x: (x.view(3, 4).t() * 2).contiguous().view(-1), X),
    "written_view": (written_view, X),
    "cat_softmax": (lambda x: torch.cat([x, x.flip(0)]).log_softmax(-1), X),
    "foreach": (foreach, X),
    "topk": (lambda x: torch.where(x > 0, x, 0.0).masked_fill(x < -1, 3.0).topk(2, 1).values, X),
    "unique": (lambda x: torch.unique(x % 3), torch.tensor([3, 1, 1, 2])),
    "nonzero": (lambda x: (x > 1).nonzero() % 2, torch.arange(4)),
    "dropout": (dropped, X),
    "autocast": (autocast, X),
}


def same_bits(function: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Whether values and gradients on npu are those on cpu, bit for bit."""
    host = x.clone().requires_grad_(x.is_floating_point())
    npu = x.clone().to("npu").requires_grad_(x.is_floating_point())
    ours, theirs = function(host), function(npu)
    if theirs.device.type != "npu" or not torch.equal(ours, theirs.cpu()):
        return False
    if not ours.requires_grad:
        return True
    ours.float().exp().sum().backward()
    theirs.float().exp().sum().backward()
    return torch.equal(host.grad, npu.grad.cpu())


def trained() -> bool:
    """Whether a copied, moved model takes the same step."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.LayerNorm(4))
    moved = copy.deepcopy(copy.deepcopy(model).to("npu"))
    for each in (model, moved):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(X.to(next(each.parameters()).device)).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1)
        optimizer.step()
    pairs = zip(model.state_dict().values(), moved.state_dict().values(), strict=True)
    return all(torch.equal(a, b.cpu()) for a, b in pairs)


def refused() -> dict[str, str]:
    """Return what an NPU would refuse, and the stand-in's message."""
    npu, said = X.to("npu"), {}
    for name, wrong in {
        "add": lambda: X + npu,
        "product": lambda: npu @ X.T,
        "numpy": lambda: npu.numpy(),
        "other": lambda: get_device("npu").claim(1),
    }.items():
        try:
            wrong()
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    claimed = get_device("npu").claim()
    same = {name: same_bits(*asked) for name, asked in FUNCTIONS.items()} | {"trained": trained()}
    print(
        json.dumps(
            {
                "claimed": claimed,
                "same": same,
                "refused": refused(),
                "asked": len(torch_npu.COUNTS),
            }
        )
    )


if __name__ == "__main__":
    main()
