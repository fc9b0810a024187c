"""Hugging Face backbones: their options, their size, and what they support of a scenario.

The size of a folder on this machine or of a config is counted on a module on the meta device. The size of a published model that
is not on this machine, which a plan may name but a run cannot read, is estimated from its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from nonet.errors import ConfigError
from nonet.models import ModelContext, ModelSize, ModelSpec, Options
from nonet.models.hf.config import HISTORY, SIDS, check_installed, get_text_config, is_local, read_config
from nonet.options import Positive, Rate, StrictModel
from nonet.plugins import HERE, PluginFiles

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# Parameters, layers, width, feed-forward width, key/value width, vocabulary: from each published config.json.
_KNOWN = {
    "qwen3-0.6b": (0.596e9, 28, 1024, 3072, 1024, 151936),
    "qwen3-1.7b": (1.72e9, 28, 2048, 6144, 1024, 151936),
    "qwen3-4b": (4.02e9, 36, 2560, 9728, 1024, 151936),
    "qwen3-8b": (8.19e9, 36, 4096, 12288, 1024, 151936),
    "qwen2.5-0.5b": (0.494e9, 24, 896, 4864, 128, 151936),
    "qwen2.5-1.5b": (1.54e9, 28, 1536, 8960, 256, 151936),
    "llama-3.2-1b": (1.24e9, 16, 2048, 8192, 512, 128256),
}


class LoraOptions(StrictModel):
    """Options of low-rank adaptation."""

    rank: Positive = 8
    alpha: Annotated[Rate, Field(description="what the difference is multiplied by, over the rank")] = 16.0
    targets: Annotated[
        list[str] | None,
        Field(description="linear layers that learn, by the last part of their names; all by default"),
    ] = None


class HfOptions(StrictModel):
    """Options of a language model as a recommender."""

    path: Annotated[
        str | None,
        Field(description="a folder that save_pretrained wrote: config.json, safetensors, a tokenizer"),
    ] = None
    config: Annotated[
        dict[str, Any] | None,
        Field(
            description="in place of a path: model_type and keys of its config; the weights are drawn by the seed"
        ),
    ] = None
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    attention: Annotated[
        Literal["uni", "sdpa", "eager"] | None,
        Field(
            description="attn_implementation: uni_attention, or what transformers has; by default it chooses"
        ),
    ] = None
    tied: Annotated[
        bool | None,
        Field(
            description="whether codes are read and written by the same rows; as the backbone's words by default"
        ),
    ] = None
    lora: Annotated[
        LoraOptions | None,
        Field(
            description="learn differences of low rank, {rank, alpha, targets}, and rows of semantic ids; all by default"
        ),
    ] = None
    prompt: Annotated[
        str | None,
        Field(
            description="words around a history, with {history} in it; what is behind it stands before every item"
        ),
    ] = None
    tokenizer: Annotated[
        str | None, Field(description="a folder that has the tokenizer, where `path` has none")
    ] = None

    @field_validator("path", "tokenizer")
    @classmethod
    def _resolve_path(cls, path: str | None, info: ValidationInfo) -> str | None:
        """Return the absolute path of a folder that is relative to the scenario, for processes with another working directory."""
        files: PluginFiles = (info.context or {}).get("files", HERE)
        here = Path(files.folder, path) if path and is_local(path) else None
        return str(here.resolve()) if here is not None and here.is_dir() else path

    @model_validator(mode="after")
    def _check_source(self) -> HfOptions:
        """Check that the model has one source, and that the prompt contains the history once."""
        if (self.path is None) == (self.config is None):
            raise ValueError("give one of path (a folder) and config (model_type and its keys)")
        if self.prompt is not None and self.prompt.count(HISTORY) != 1:
            raise ValueError(
                f"prompt must contain {HISTORY} once, e.g. 'Films of a user: {HISTORY} then'; got {self.prompt!r}"
            )
        return self


class HfSpec(ModelSpec):
    """A causal language model that generates semantic ids as tokens."""

    options: ClassVar[type[StrictModel]] = HfOptions
    build: ClassVar[str] = "nonet.models.hf.build:build"
    features: ClassVar[tuple[str, ...]] = ("item", "user")
    blocks: ClassVar[bool] = False
    ahead: ClassVar[int] = 1
    aligns: ClassVar[bool] = True
    exports: ClassVar[str] = "nonet.models.hf.export:write_folder"

    def size(self, options: Options, around: ModelContext) -> ModelSize:
        """Count the parameters of the model, or estimate them from its name if its folder is not on this machine."""
        path = options.get("path")
        if path and not (is_local(path) and Path(path).is_dir()):
            return _guess_size(str(path), options.get("precision", "fp32"), around.levels)
        return _count_size(options, around)

    def hash_base(self, options: Options) -> str | None:
        """Return the hash of the model folder; None if the model has none."""
        path = options.get("path")
        if not path:
            return None
        if not Path(path, "config.json").is_file():
            raise ConfigError(
                f"model.path: {path} has no config.json; put back the folder that the run was trained with"
            )
        from nonet.models.hf.backbone import hash_folder

        return hash_folder(str(path))

    def check(self, scenario: Any) -> None:
        """Check that the model's config can be read and suits the scenario."""
        check_installed()
        options = scenario.model.get_options()
        config = get_text_config(read_config(options))
        self._check_stages(scenario)
        # These modules import torch, which plans of other models do not need.
        from nonet.models.hf.lora import list_linear_layers, select_targets
        from nonet.models.hf.text import make_layout

        _check_heads(config)
        model = _build_meta_model(_freeze(options.get("config")), options.get("path"))
        # The collision level is one more.
        levels = int(scenario.tokenizer.get_options().get("levels", 3)) + 1
        layout = make_layout(options, levels, int(config.vocab_size))
        _check_window(config, scenario.data.history, layout)
        _check_words(options)
        if options.get("lora"):
            select_targets(options["lora"]["targets"], list_linear_layers(model))

    def find_unsupported(self, scenario: Any) -> Iterator[str]:
        """Yield a model path that is not on this machine."""
        path = scenario.model.get_options().get("path")
        if path and not is_local(path):
            yield f"model.path: {path} (a folder on this machine is read)"

    def _check_stages(self, scenario: Any) -> None:
        """Check that the stages suit a language model."""
        from nonet.models.hf.text import read_tokenizer

        for name, stage in scenario.stages.items():
            if stage.kind.aligns:
                read_tokenizer(scenario.model.get_options(), f"stages.{name}")
            if (getattr(stage, "ahead", None) or 1) > 1:
                raise ConfigError(
                    f"stages.{name}.ahead: {stage.ahead} with model.use: hf, which predicts codes as successive tokens; "
                    "remove it, or set it to 1"
                )


SPEC = HfSpec()


def _check_heads(config: Any) -> None:
    """Check that the query heads are a multiple of the key-value heads."""
    heads = int(getattr(config, "num_attention_heads", None) or 1)
    shared = int(getattr(config, "num_key_value_heads", None) or heads)
    if heads % shared:
        raise ConfigError(
            f"model: num_attention_heads {heads} is not a multiple of num_key_value_heads {shared}"
        )


def _check_window(config: Any, history: int, layout: Any) -> None:
    """Check that the longest history fits the model's positions and attention window."""
    positions = int(layout.count_positions(history + 1))
    for name, used in (
        ("max_position_embeddings", True),
        ("sliding_window", getattr(config, "use_sliding_window", True)),
    ):
        most = getattr(config, name, None)
        if used and most and most < positions:
            fit = int(most - layout.count_positions(0)) // layout.stride - 1
            raise ConfigError(
                f"model: its {name} is {most}, and data.history: {history} makes sequences of {positions} "
                f"positions ({layout.stride} an event); lower data.history to {max(1, fit)} or fewer"
            )


def _check_words(options: Options) -> None:
    from nonet.models.hf.text import check_names, find_tokenizer_folder, has_tokenizer, read_tokenizer

    folder = find_tokenizer_folder(options)
    if folder and has_tokenizer(folder) and not (Path(folder) / SIDS).is_file():
        check_names(read_tokenizer(options, "model"), folder)


def _count_size(options: Options, around: ModelContext) -> ModelSize:
    """Count the parameters of a model from its config."""
    config = get_text_config(read_config(options))
    layers, width = int(config.num_hidden_layers), int(config.hidden_size)
    heads = int(getattr(config, "num_attention_heads", 1) or 1)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head = int(getattr(config, "head_dim", None) or width // heads)
    parameters, words, linears = _shape(_freeze(options.get("config")), options.get("path"))
    rows = (1 if getattr(config, "tie_word_embeddings", False) else 2) * around.levels * around.codes * width
    lora = options.get("lora")
    added = _count_lora_parameters(lora, linears) if lora else 0
    return ModelSize(
        parameters=parameters + rows + added,
        frozen=parameters if lora else words,
        matrices=0 if lora else sum(out * into for _, out, into in linears),
        layers=layers,
        width=width,
        feed_forward=int(getattr(config, "intermediate_size", None) or 4 * width),
        kv_width=kv_heads * head,
        vocabulary=around.codes,
        levels=around.levels,
        positions_an_event=around.levels,
        weight_bytes=_BYTES[options.get("precision", "fp32")],
    )


@cache
def _shape(config: Any, path: str | None) -> tuple[int, int, tuple[tuple[str, int, int], ...]]:
    """Return the number of parameters, that of the words (which are frozen), and name and shape of each linear layer."""
    model = _build_meta_model(config, path)
    tables = {
        id(table.weight): table.weight.numel()
        for table in (model.get_input_embeddings(), model.get_output_embeddings())
        if table is not None
    }
    linears = []
    for path_, module in model.named_modules():
        weight = getattr(module, "weight", None)
        conv = type(module).__name__ == "Conv1D"  # GPT-2's linear layer stores its weight transposed.
        if (type(module).__name__ == "Linear" or conv) and weight is not None and id(weight) not in tables:
            out, into = weight.shape[::-1] if conv else weight.shape
            linears.append((path_.rsplit(".", 1)[-1], int(out), int(into)))
    total = sum(weight.numel() for weight in model.parameters())
    return total, sum(tables.values()), tuple(linears)


def _count_lora_parameters(lora: Any, linears: Sequence[tuple[str, int, int]]) -> int:
    """Return the parameters of LoRA's differences."""
    targets = lora.get("targets")
    rank = int(lora["rank"])
    return sum(rank * (out + into) for name, out, into in linears if not targets or name in targets)


@cache
def _build_meta_model(config: Any, path: str | None) -> Any:
    """Create the module on the meta device, without memory.

    Raises:
        ConfigError: The sizes in the config do not fit each other.
    """
    import torch
    from transformers import AutoModelForCausalLM

    read = read_config({"config": _unfreeze(config), "path": path})
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(read)
    except (ValueError, TypeError, RuntimeError, AssertionError, ZeroDivisionError) as error:
        said = " ".join(str(error).split())[:300]
        raise ConfigError(f"model: {read.model_type} cannot be built from its config: {said}") from None


def _freeze(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _freeze(part)) for key, part in sorted(value.items()))
    return ("list", *map(_freeze, value)) if isinstance(value, list) else value


def _unfreeze(value: Any) -> Any:
    if isinstance(value, tuple) and value and value[0] == "list":
        return [_unfreeze(part) for part in value[1:]]
    return {key: _unfreeze(part) for key, part in value} if isinstance(value, tuple) else value


def _guess_size(path: str, precision: str, levels: int) -> ModelSize:
    """Estimate the size of a model whose folder is not on this machine, from its name."""
    name = path.rstrip("/").rsplit("/", 1)[-1]
    known = _KNOWN.get(name.lower())
    size = _BYTES.get(precision, 4)
    if known:
        parameters, layers, width, wide, kv, words = known
        return ModelSize(int(parameters), layers, width, wide, kv, words, levels, levels, size)
    said = re.search(r"(\d+(?:\.\d+)?)\s*([bm])(?![a-z])", name.lower())
    parameters = float(said.group(1)) * (1e9 if said.group(2) == "b" else 1e6) if said else 1e9
    width = max(256, round((parameters / 12 / 24) ** 0.5 / 128) * 128)
    source = "its name" if said else "nothing: 1 B parameters assumed"
    shape: dict[str, Any] = {"layers": 24, "width": width, "feed_forward": 4 * width, "kv_width": width}
    return ModelSize(
        int(parameters),
        **shape,
        vocabulary=128000,
        levels=levels,
        positions_an_event=levels,
        weight_bytes=size,
        assumed=f"the shape of {name or path} is estimated from {source}",
    )
