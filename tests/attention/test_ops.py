"""The operators under torch's own checks: opcheck, gradcheck, torch.compile with one graph, autocast; memory; bad input."""

import subprocess
import sys

import pytest
import torch

from nonet.attention.attention import uni_attention
from nonet.attention.calls.bias import RelativeBias
from nonet.attention.masks.mask import UniMask
from nonet.errors import ConfigError

CUT = torch.tensor([0, 5, 5, 12])


def cuts(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def draw(tokens=12, heads=2, width=4, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(tokens, heads, width, dtype=dtype, generator=generator).requires_grad_() for _ in range(3)
    ]


def arguments(mask, activation="softmax", backend="sdpa", sink=None, bias=None):
    """Capture the arguments that a call passes to the operator."""
    caught = []
    q, k, v = draw()
    watch = torch.ops.nonet.attend

    class Catch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op == watch.default:
                caught.append(args)
            return op(*args, **(kwargs or {}))

    with (
        Catch(),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):  # under autocast the operator is called, not its eager twin
        uni_attention(
            q,
            k,
            v,
            mask=mask,
            cu_seqlens_q=CUT,
            activation=activation,
            scaling_length=9.0,
            backend=backend,
            sink=sink,
            bias=bias,
        )
    return (q, k, v, *caught[0][3:])


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_gradients_of_the_operator_have_the_dtypes_of_its_inputs(backend):
    """A compiled function takes the dtypes from the fake kernel, without looking at the result."""
    rest = arguments(UniMask.causal(), backend=backend)[3:]
    q, k, v = draw(dtype=torch.bfloat16)
    with torch.no_grad():
        out, lse = torch.ops.nonet.attend(q, k, v, *rest)
        gradients = torch.ops.nonet.attend_backward(out, out, lse, q, k, v, *rest)
    assert out.dtype == torch.bfloat16
    assert [gradient.dtype for gradient in gradients[:3]] == [torch.bfloat16] * 3


@pytest.mark.parametrize("case", ["causal", "table", "refined", "sink", "silu", "bias"])
def test_opcheck_passes(case):
    word = torch.arange(12) % 3 + 1
    made = {
        "causal": lambda: arguments(UniMask.causal()),
        "table": lambda: arguments(UniMask.hstu(torch.tensor([2, 0, 3]))),
        "refined": lambda: arguments(UniMask.bos_interval(3) & UniMask.classes(word, word)),
        "sink": lambda: arguments(
            UniMask.causal(), sink=torch.zeros(2, dtype=torch.float64, requires_grad=True)
        ),
        "silu": lambda: arguments(UniMask.causal(), "silu", "reference"),
        "bias": lambda: arguments(
            UniMask.causal(),
            backend="reference",
            bias=RelativeBias(
                torch.zeros(2, 5, dtype=torch.float64, requires_grad=True),
                torch.zeros(1, 4, dtype=torch.float64, requires_grad=True),
                torch.arange(12).int(),
                torch.arange(12).int(),
            ),
        ),
    }[case]()
    found = torch.library.opcheck(torch.ops.nonet.attend.default, made)
    assert set(found.values()) == {"SUCCESS"}


def test_gradcheck_of_both_paths():
    q, k, v = draw()
    sink = torch.tensor([0.3, -1.0], dtype=torch.float64, requires_grad=True)
    for mask in (UniMask.causal(), UniMask.hstu(torch.tensor([2, 0, 3]), max_attn_len=3)):
        for backend in ("sdpa", "reference"):
            call = lambda q, k, v, s, mask=mask, backend=backend: uni_attention(  # noqa: E731
                q,
                k,
                v,
                mask=mask,
                cu_seqlens_q=CUT,
                sink=s,
                backend=backend,
            )
            assert torch.autograd.gradcheck(call, (q, k, v, sink))
    position = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    silu = lambda q, k, v, p: uni_attention(  # noqa: E731
        q,
        k,
        v,
        mask=UniMask.causal(),
        cu_seqlens_q=CUT,
        activation="silu",
        scaling_length=7.0,
        bias=RelativeBias(p),
    )
    assert torch.autograd.gradcheck(silu, (q, k, v, position))


MADE = {
    "causal": lambda targets, cut, word, table: UniMask.causal(),
    "hstu": lambda targets, cut, word, table: UniMask.hstu(targets, max_attn_len=9),
    "session": lambda targets, cut, word, table: (
        UniMask.session(cut, prefix=targets) & UniMask.causal(window=4)
    ),
    "tree": lambda targets, cut, word, table: UniMask.beam_tree(targets, torch.tensor([[1, 0]])),
    "refined": lambda targets, cut, word, table: UniMask.bos_interval(3) & UniMask.classes(word, word),
    "cross": lambda targets, cut, word, table: UniMask.cross(word, word.cumsum(0)),
    "table": lambda targets, cut, word, table: table,
}


@pytest.mark.parametrize("form", MADE)
def test_compiled_in_full_there_is_one_graph_for_ten_batches(form):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    def layer(q, k, v, cut, targets, word, table):
        mask = MADE[form](targets, cut, word, table)
        return uni_attention(q.sin(), k, v, mask=mask, cu_seqlens_q=cut).cos()

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for batch in range(10):
        lengths = [3 + batch, 2, 7 + 3 * batch, 5]
        cut, targets, word = cuts(lengths), torch.tensor([1, 2, 3, 2]), torch.arange(sum(lengths)) % 3 + 1
        table = UniMask.target_groups(targets, 2).build_table(cut)
        inputs = draw(sum(lengths), dtype=torch.float32, seed=batch)
        got = compiled(*inputs, cut, targets, word, table)
        assert torch.equal(got, layer(*inputs, cut, targets, word, table))
        got.sum().backward()
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
def test_inductor_trains_with_the_same_gradients():
    torch._dynamo.reset()

    def layer(q, k, v, cut):
        return uni_attention(q.sin(), k, v, mask=UniMask.causal(window=4), cu_seqlens_q=cut).cos()

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for lengths in ([5, 3, 9], [8, 2, 6]):
        cut = cuts(lengths)
        mine, twins = draw(sum(lengths), dtype=torch.float32), draw(sum(lengths), dtype=torch.float32)
        compiled(*mine, cut).sum().backward()
        layer(*twins, cut).sum().backward()
        for x, y in zip(mine, twins, strict=True):
            torch.testing.assert_close(x.grad, y.grad, atol=1e-6, rtol=0)


def test_autocast_computes_in_its_type_and_gradients_come_back_in_the_inputs():
    inputs = draw(dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            out = uni_attention(*inputs, mask=UniMask.causal(), cu_seqlens_q=CUT)
        assert out.dtype == dtype
        out.float().sum().backward()
    assert all(x.grad.dtype == torch.float32 and x.grad.abs().sum() > 0 for x in inputs)


def test_eager_and_operator_give_the_same_bits():
    for mask in (UniMask.causal(), UniMask.hstu(torch.tensor([2, 0, 3]))):
        given = arguments(mask)
        out, lse = torch.ops.nonet.attend(*given)
        again, lse_again = uni_attention(*given[:3], mask=mask, cu_seqlens_q=CUT, return_lse=True)
        assert torch.equal(out, again)
        assert torch.equal(lse, lse_again)
        both = [torch.autograd.grad(o.square().sum(), given[:3]) for o in (out, again)]
        assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


_MEMORY = """
import torch
torch.set_num_threads(1)
from nonet.attention.attention import uni_attention
from nonet.attention.masks.mask import UniMask
n, mask = 65536, {mask}
cut = torch.tensor([0, n])
q, k, v = (torch.randn(n, 1, 8, requires_grad=True) for _ in range(3))
warm = uni_attention(q[:600], k[:600], v[:600], mask=UniMask.causal(window=3), cu_seqlens_q=torch.tensor([0, 600]))
def status(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = status("VmRSS")
out = uni_attention(q, k, v, mask=mask, cu_seqlens_q=cut)
out.sum().backward()
print(status("VmHWM") - before)
"""


@pytest.mark.parametrize(
    "mask",
    [
        "UniMask.causal(window=512)",
        "UniMask.sinks_window(64, 300)",
        "UniMask.bos_interval(8) & UniMask.causal(window=256)",
    ],
)
def test_memory_is_linear_at_65k_tokens(mask):
    """An N x N bool would be 4.3 GB; a few hundred bytes a token are 100 MB."""
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY.format(mask=mask)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 150_000, f"{done.stdout} KiB"


def refused(match, error=ConfigError, **changes):
    q, k, v = draw()
    given = {"q": q, "k": k, "v": v, "mask": UniMask.causal(), "cu_seqlens_q": CUT} | changes
    with pytest.raises(error, match=match):
        uni_attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


def test_bad_input_is_one_error_that_names_the_argument_its_shape_and_what_was_expected():
    q, k, v = draw()
    refused(
        r"cu_seqlens_q must rise from 0 to the 12 tokens of q; got \[0, 5, 9\]",
        cu_seqlens_q=torch.tensor([0, 5, 9]),
    )
    refused(r"cu_seqlens_q must rise .* got \[0, 9, 5, 12\]", cu_seqlens_q=torch.tensor([0, 9, 5, 12]))
    refused(r"cu_seqlens_q has shape \[2, 2\]", cu_seqlens_q=torch.zeros(2, 2).long())
    refused("cu_seqlens_q has shape .* torch.float32", cu_seqlens_q=CUT.float())
    refused("cu_seqlens_k must rise from 0 to the 12 tokens of k", cu_seqlens_k=torch.tensor([0, 5, 5, 13]))
    refused("cu_seqlens_q is on meta, q on cpu", cu_seqlens_q=CUT.to("meta"))
    refused("q has 12 tokens and k 11", k=k[:11], v=v[:11])
    refused("needs cu_seqlens_q", cu_seqlens_q=None)
    refused(r"made for 11 queries and 11 keys", mask=UniMask.causal().build_table(cuts([5, 6])))
    refused("cuts them elsewhere", mask=UniMask.causal(window=2).build_table(cuts([6, 0, 6])))
    refused(
        "intervals for 3 queries", mask=UniMask.intervals(torch.zeros(3, 1).long(), torch.ones(3, 1).long())
    )
    refused(r"targets has shape \[2\]; this batch wants \[3\]", mask=UniMask.hstu(torch.tensor([1, 1])))
    refused("cannot express the mask Tensor", mask=torch.ones(12, 12).bool())
    refused(
        "q and k have width 260",
        q=torch.zeros(12, 2, 260),
        k=torch.zeros(12, 2, 260),
        v=torch.zeros(12, 2, 8),
    )
    refused("v have width 0", v=v[..., :0])
    refused("are torch.float64, torch.float32 and torch.float64", k=k.float())
    refused("share one of", q=q.int(), k=k.int(), v=v.int())
    refused(
        r"q \[12, 2, 4\] has 2 heads, k \[12, 3, 4\]",
        k=torch.zeros(12, 3, 4).double(),
        v=torch.zeros(12, 3, 4).double(),
    )
    refused(r"got \[12, 2, 4\], \[12, 2, 3\]", k=k[..., :3])
    refused("activation is 'relu'", activation="relu")
    refused("scaling_length is None", activation="silu")
    refused("soft_cap is -1", soft_cap=-1.0)
    refused(r"sink has shape \[3\]", sink=torch.zeros(3))
    refused("must be a RelativeBias", bias=torch.zeros(12, 12))
    refused("backend is 'flash'", backend="flash")
    refused("backend 'sdpa' computes a softmax", backend="sdpa", soft_cap=3.0)
    refused("backend 'triton' runs on CUDA", backend="triton")
    refused("dense q .* want", q=q[None], k=k[None], v=v[None])
