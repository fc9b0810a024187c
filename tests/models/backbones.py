"""Tiny backbones, drawn or in a folder with a tokenizer of its own, and catalogues for their codes."""

import itertools

import numpy as np
import torch

from nonet.models.generation.trie import Trie
from nonet.models.spec import build_model
from nonet.types import Jagged, SampleBatch

CODES = (5, 7, 6, 2)
FEATURES = {"item": 8, "user": 4}
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "initializer_range": 0.2,  # far from even answers
}
WORDS = ("films", "a", "user", "liked", "next", ":", "old", "new", "red", "blue", "green", "house")


def recommender(config=None, *, features=FEATURES, codes=CODES, seed=3, **options):
    """In eval mode. Without `path` drawn from a config, Qwen3's by default."""
    where = {} if "path" in options else {"config": config or QWEN3}
    model = build_model({"use": "hf", **where, **options}, codes, features, seed).eval()
    generator = torch.Generator().manual_seed(seed)
    for table in (model.gap, model.rating, model.kind):  # zero at first, and silent
        torch.nn.init.normal_(table.weight, std=0.2, generator=generator)
    return model


def catalogue(items=80, codes=CODES, seed=0):
    """Semantic ids [I, L] and their trie."""
    draw = np.random.default_rng(seed)
    sids = np.unique(np.stack([draw.integers(0, k, items) for k in codes], 1), axis=0)
    return sids, Trie.build(sids, codes)


def batch_of(sids, lengths=(4, 0, 1, 9, 3), seed=0):
    """Histories of items, all events targets; and rows of FEATURES."""
    generator = torch.Generator().manual_seed(seed)
    events, offsets = sum(lengths), torch.tensor([0, *itertools.accumulate(lengths)])
    item = torch.randint(0, len(sids), (events,), generator=generator)
    batch = SampleBatch(
        item=Jagged(item, offsets),
        sid=torch.from_numpy(np.asarray(sids))[item].long(),
        time=Jagged(torch.randint(0, 10**6, (events,), generator=generator).cumsum(0), offsets),
        event=Jagged(torch.randint(0, 3, (events,), generator=generator), offsets),
        context={
            "user": torch.arange(len(lengths)),
            "rating": Jagged(torch.randint(0, 11, (events,), generator=generator).float() / 2, offsets),
        },
        loss_mask=Jagged(torch.ones(events, dtype=torch.bool), offsets),
        target=None,
        uid=[str(i) for i in range(len(lengths))],
    )
    rows = {
        "item": torch.randn(events, 8, generator=generator),
        "user": torch.randn(len(lengths), 4, generator=generator),
    }
    return batch, rows


def folder_of(path, config=None, *, tokenizer=True, extra_words=()):
    """Make a folder as save_pretrained writes it: drawn weights, generation settings that sample, a tokenizer of whole words."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    words = ("<unk>", "<s>", "</s>", *WORDS, *extra_words)
    keys = {**(config or QWEN3), "vocab_size": len(words)}
    kind = keys.pop("model_type")
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **keys))
    model.generation_config = GenerationConfig(do_sample=True, temperature=9.0, top_k=3)
    model.save_pretrained(path)
    if tokenizer:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        whole = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
        whole.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(
            tokenizer_object=whole, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
        ).save_pretrained(path)
    return str(path)
