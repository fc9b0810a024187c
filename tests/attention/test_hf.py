"""Hugging Face decoders under uni_attention: logits, gradients and generation equal those of eager attention."""

import pytest
import torch

from nonet.attention.masks.mask import UniMask
from nonet.errors import ConfigError

transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def model(kind, implementation, **changes):
    from nonet.attention.hf import register

    register()
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(SMALL | changes))
    made = getattr(transformers, f"{kind}ForCausalLM")._from_config(
        config, attn_implementation=implementation
    )
    return made.eval()


def pair(kind, **changes):
    return model(kind, "uni_attention", **changes), model(kind, "eager", **changes)


TOKENS = torch.randint(2, 64, (3, 12), generator=torch.Generator().manual_seed(1))
LEFT = torch.ones(3, 12, dtype=torch.long)
LEFT[0, :5] = 0
LEFT[1, :1] = 0


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {}),
        ("Qwen2", {}),
        ("Gemma2", {"sliding_window": 4, "query_pre_attn_scalar": 8}),
        ("Mistral", {"sliding_window": 5}),
    ],
)
@pytest.mark.parametrize("padding", [None, LEFT, LEFT.flip(1)], ids=["whole", "left", "right"])
def test_logits_and_gradients_equal_eager_attention(kind, changes, padding):
    mine, eager = pair(kind, **changes)
    kept = torch.ones_like(TOKENS).bool() if padding is None else padding.bool()
    found = []
    for one in (mine, eager):
        logits = one(input_ids=TOKENS, attention_mask=padding).logits[kept]
        logits.square().mean().backward()
        found.append((logits, one.model.layers[0].self_attn.k_proj.weight.grad))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=0)
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-5, rtol=0)


def test_generation_with_a_cache_and_left_padding_equals_eager():
    mine, eager = pair("Qwen2")
    ask = {"input_ids": TOKENS, "attention_mask": LEFT, "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(mine.generate(**ask), eager.generate(**ask))


def test_a_four_dimensional_mask_is_read_exactly_or_refused():
    mine, eager = pair("Llama")
    seen = UniMask.hstu(torch.tensor([4, 0, 2])).to_dense(torch.tensor([0, 12, 24, 36]))
    blocks = torch.stack([seen[12 * b : 12 * b + 12, 12 * b : 12 * b + 12] for b in range(3)])[:, None]
    additive = torch.zeros(blocks.shape, dtype=torch.float32).masked_fill(
        ~blocks, torch.finfo(torch.float32).min
    )
    want = eager(input_ids=TOKENS, attention_mask=additive).logits
    for given in (blocks, additive):
        torch.testing.assert_close(
            mine(input_ids=TOKENS, attention_mask=given).logits, want, atol=1e-5, rtol=0
        )
    comb = ((torch.arange(12)[:, None] + torch.arange(12)) % 2 == 0).expand(3, 1, 12, 12)
    with pytest.raises(ConfigError, match="6 intervals in a row"):
        mine(input_ids=TOKENS, attention_mask=comb)
    with pytest.raises(ConfigError, match="adds numbers to scores"):
        mine(input_ids=TOKENS, attention_mask=additive.clamp_min(-3.0))


def test_what_it_cannot_compute_is_refused_not_dropped():
    mine = model("Llama", "uni_attention", attention_dropout=0.1).train()
    with pytest.raises(ConfigError, match=r"dropout 0.1"):
        mine(input_ids=TOKENS)
    from nonet.attention.hf import attention_forward

    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ConfigError, match="position_bias"):
        attention_forward(None, q, q, q, None, position_bias=q)
    with pytest.raises(ConfigError, match=r"attention_mask is \[1, 2, 3, 3\]"):
        attention_forward(None, q, q, q, torch.ones(1, 2, 3, 3))
