"""AdamW: another name for adam, because weight decay is decoupled for every optimizer."""

from nonet.embedding.tables.optimizers.adam import SPEC as SPEC
