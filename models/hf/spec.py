"""Hugging Face backbones: their options, their size, and what they support of a scenario.

The size of a folder on this machine or of a config is counted on a module on the meta device. The size of a published model that
is not on this machine, which a plan may name but a run cannot read, is estimated from its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from nonet.addresses import is_address
from nonet.errors import ConfigError
from nonet.models import ModelContext, ModelSize, ModelSpec, Options
from nonet.models.hf.config import (
    HISTORY,
    SIDS,
    check_heads,
    check_installed,
    check_window,
    fetch_folders,
    format_error,
    get_text_config,
    read_config,
)
from nonet.options import Positive, Rate, StrictModel
from nonet.plugins import HERE, PluginFiles

_WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# Parameters, layers, width, feed-forward width, key/value width, vocabulary: from each published config.json.
_PUBLISHED: dict[str, tuple[int, int, int, int, int, int]] = {
    "qwen3-0.6b": (596_000_000, 28, 1024, 3072, 1024, 151936),
    "qwen3-1.7b": (1_720_000_000, 28, 2048, 6144, 1024, 151936),
    "qwen3-4b": (4_020_000_000, 36, 2560, 9728, 1024, 151936),
    "qwen3-8b": (8_190_000_000, 36, 4096, 12288, 1024, 151936),
    "qwen2.5-0.5b": (494_000_000, 24, 896, 4864, 128, 151936),
    "qwen2.5-1.5b": (1_540_000_000, 28, 1536, 8960, 256, 151936),
    "llama-3.2-1b": (1_240_000_000, 16, 2048, 8192, 512, 128256),
}


class LoraOptions(StrictModel):
    """Options of low-rank adaptation."""

    rank: Positive = 8
    alpha: Annotated[
        Rate, Field(description="the factor of the learned difference, before it is divided by the rank")
    ] = 16.0
    targets: Annotated[
        list[str] | None,
        Field(description="linear layers that are adapted, by the last part of their names; all by default"),
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
            description="attn_implementation: uni_attention or one of transformers' own, which chooses by default"
        ),
    ] = None
    tied: Annotated[
        bool | None,
        Field(
            description="whether input and output embeddings of codes are the same rows; by default as for words"
        ),
    ] = None
    lora: Annotated[
        LoraOptions | None,
        Field(
            description="learn only low-rank differences, {rank, alpha, targets}, and the rows of semantic ids; all weights by "
            "default"
        ),
    ] = None
    prompt: Annotated[
        str | None,
        Field(
            description="text around a history, which contains {history} once; the text after it stands before every item"
        ),
    ] = None
    tokenizer: Annotated[str | None, Field(description="a folder with the tokenizer, if `path` has none")] = (
        None
    )

    @field_validator("path", "tokenizer")
    @classmethod
    def _resolve_path(cls, path: str | None, info: ValidationInfo) -> str | None:
        """Return the absolute path of a folder that is relative to the scenario, for processes with another working directory."""
        files: PluginFiles = (info.context or {}).get("files", HERE)
        here = Path(files.folder, path) if path and not is_address(path) else None
        return str(here.resolve()) if here is not None and here.is_dir() else path

    @model_validator(mode="after")
    def _check_source(self) -> HfOptions:
        """Check that the model has one source, and that the prompt contains the history once."""
        if bool(self.path) == bool(self.config):
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
    ahead: ClassVar[int] = 1
    aligns: ClassVar[bool] = True
    packages: ClassVar[str] = "torch, pyarrow, transformers"
    exports: ClassVar[str] = "nonet.models.hf.export:write_folder"
    imports: ClassVar[str] = "nonet.models.hf.export:load_folder"

    def size(self, options: Options, around: ModelContext) -> ModelSize:
        """Count the parameters of the model, or estimate them from its name if its folder is not on this machine."""
        path = options.get("path")
        if path and not Path(path).is_dir():
            return _guess_size(str(path), options.get("precision", "fp32"), around.levels)
        return _count_size(options, around)

    def find_tensor_limit(self, options: Options, ranks: int) -> str | None:
        """Return why the layers cannot be divided among so many ranks; None if they can."""
        if options.get("lora"):
            return "model.lora (leave tensor or lora out)"
        path = options.get("path")
        if path and not Path(path).is_dir():
            return None
        config = _find_backbone(options).config
        styles = set((getattr(config, "base_model_tp_plan", None) or {"": "none"}).values())
        if not styles <= {"colwise", "rowwise", "replicated_with_grad_allreduce"}:
            return f"model_type {config.model_type} (its plan of tensor parallelism is not supported; leave tensor out)"
        heads = int(config.num_attention_heads)
        sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": 0}
        for key in sizes:
            if (size := int(getattr(config, key, None) or sizes[key])) % ranks:
                return f"{key}: {size} of the model's config (it must be a multiple of {ranks})"
        return None

    def hash_base(self, options: Options) -> str | None:
        """Return the hash of the model folder; None if the model has none."""
        path = fetch_folders(options).get("path")
        if not path:
            return None
        if not Path(path, "config.json").is_file():
            raise ConfigError(
                f"model.path: {path} has no config.json; put back the folder that the run was trained with"
            )
        from nonet.models.hf.language_model import hash_folder

        return hash_folder(str(path))

    def check(self, scenario: Any) -> None:
        """Check that no stage predicts several events at once."""
        for name, stage in scenario.stages.items():
            if (getattr(stage, "ahead", None) or 1) > 1:
                raise ConfigError(
                    f"stages.{name}.ahead: {stage.ahead} with model.use: hf, which predicts codes as successive tokens; "
                    "remove it, or set it to 1"
                )

    def check_files(self, scenario: Any) -> None:
        """Check that the model's config and tokenizer can be read and suit the scenario."""
        check_installed()
        options = fetch_folders(scenario.model.get_options())
        backbone = _find_backbone(options)
        config = backbone.config
        # These modules import torch, which plans of other models do not need.
        from nonet.models.hf.lora import list_linear_layers, select_targets
        from nonet.models.hf.text import make_layout, read_tokenizer

        for name, stage in scenario.stages.items():
            if stage.kind.aligns or options.get("tokenizer"):
                read_tokenizer(options, f"stages.{name}" if stage.kind.aligns else "model")
        check_heads(config)
        model = backbone.model  # raises an error if it cannot be built
        # The tokenizer appends a collision level to its own.
        levels = int(scenario.tokenizer.get_options().get("levels", 3)) + 1
        layout = make_layout(options, levels, int(config.vocab_size))
        check_window(config, scenario.data.history, layout)
        _check_words(options)
        if options.get("lora"):
            select_targets(options["lora"]["targets"], list_linear_layers(model))


SPEC = HfSpec()


class _PlannedBackbone:
    """The config of a language model, which is read once, and its module on the meta device, where parameters take no memory.

    Args:
        options: The options `config` and `path`.

    Attributes:
        config: The config of the text decoder.
    """

    def __init__(self, options: Options):
        self._model_config = read_config(options)
        self.config = get_text_config(self._model_config)

    @cached_property
    def model(self) -> Any:
        """The module. Raises ConfigError if the sizes in the config do not fit each other."""
        import torch
        from transformers import AutoModelForCausalLM

        try:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(self._model_config, trust_remote_code=False)
        except (ValueError, TypeError, RuntimeError, AssertionError, ZeroDivisionError) as error:
            raise ConfigError(
                f"model: {self._model_config.model_type} cannot be built from its config: {format_error(error)}"
            ) from None

    @cached_property
    def word_parameters_by_id(self) -> dict[int, int]:
        """The number of parameters of each table of word embeddings, which are frozen, by id of the table."""
        tables = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        return {id(table.weight): table.weight.numel() for table in tables if table is not None}

    @cached_property
    def linears(self) -> list[tuple[str, int, int]]:
        """The name, n_out and n_in of each linear layer."""
        linears = []
        for module_path, module in self.model.named_modules():
            weight = getattr(module, "weight", None)
            is_conv1d = (
                type(module).__name__ == "Conv1D"
            )  # GPT-2's linear layer stores its weight transposed.
            if (
                (type(module).__name__ == "Linear" or is_conv1d)
                and weight is not None
                and id(weight) not in self.word_parameters_by_id
            ):
                n_out, n_in = weight.shape[::-1] if is_conv1d else weight.shape
                linears.append((module_path.rsplit(".", 1)[-1], int(n_out), int(n_in)))
        return linears


def _find_backbone(options: Options) -> _PlannedBackbone:
    """Return the backbone of the options `config` and `path`; this process reads it once."""
    return _read_backbone(json.dumps(options.get("config"), sort_keys=True), options.get("path"))


@cache
def _read_backbone(config_json: str, path: str | None) -> _PlannedBackbone:
    """Read a backbone; `config` is given as JSON, because `cache` cannot hash a dictionary."""
    return _PlannedBackbone({"config": json.loads(config_json), "path": path})


def _check_words(options: Options) -> None:
    """Check that the names of semantic-ID tokens are new to the tokenizer, if its folder has no semantic IDs yet."""
    from nonet.models.hf.text import check_names, find_tokenizer_folder, has_tokenizer, read_tokenizer

    folder = find_tokenizer_folder(options)
    if folder and has_tokenizer(folder) and not (Path(folder) / SIDS).is_file():
        check_names(read_tokenizer(options, "model"), folder)


def _count_size(options: Options, around: ModelContext) -> ModelSize:
    """Compute the size of a model from its config, with the rows of semantic IDs and LoRA's matrices."""
    from nonet.models.hf.text import make_layout  # imports torch, which plans of other models do not need

    backbone = _find_backbone(options)
    config = backbone.config
    layers, width = int(config.num_hidden_layers), int(config.hidden_size)
    heads = int(getattr(config, "num_attention_heads", 1) or 1)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_width = int(getattr(config, "head_dim", None) or width // heads)
    backbone_parameters = sum(weight.numel() for weight in backbone.model.parameters())
    tied = options.get("tied")
    if tied is None:
        tied = bool(getattr(config, "tie_word_embeddings", False))
    sid_parameters = (1 if tied else 2) * around.levels * around.codes * width
    lora = options.get("lora")
    lora_parameters = _count_lora_parameters(lora, backbone.linears) if lora else 0
    return ModelSize(
        parameters=backbone_parameters + sid_parameters + lora_parameters,
        frozen=backbone_parameters if lora else sum(backbone.word_parameters_by_id.values()),
        matrices=0 if lora else sum(n_out * n_in for _, n_out, n_in in backbone.linears),
        layers=layers,
        width=width,
        feed_forward=int(getattr(config, "intermediate_size", None) or 4 * width),
        kv_width=kv_heads * head_width,
        vocabulary=around.codes,
        levels=around.levels,
        positions_an_event=make_layout(options, around.levels).stride,
        weight_bytes=_WEIGHT_BYTES[options.get("precision", "fp32")],
    )


def _count_lora_parameters(lora: Any, linears: Sequence[tuple[str, int, int]]) -> int:
    """Return the number of parameters of LoRA's two matrices, for all target layers."""
    targets = lora.get("targets")
    rank = int(lora["rank"])
    return sum(rank * (n_out + n_in) for name, n_out, n_in in linears if not targets or name in targets)


def _guess_size(path: str, precision: str, levels: int) -> ModelSize:
    """Estimate the size of a model whose folder is not on this machine, from its name."""
    name = path.rstrip("/").rsplit("/", 1)[-1]
    shape, assumed = _PUBLISHED.get(name.lower()), ""
    if shape is None:
        size_in_name = re.search(r"(\d+(?:\.\d+)?)\s*([bm])(?![a-z])", name.lower())
        parameters, source = 1e9, "nothing: 1 B parameters assumed"
        if size_in_name:
            parameters = float(size_in_name.group(1)) * (1e9 if size_in_name.group(2) == "b" else 1e6)
            source = "its name"
        # A transformer layer has about 12 width^2 parameters; 24 layers are assumed, and a width that is a multiple of 128.
        width = max(256, round((parameters / 12 / 24) ** 0.5 / 128) * 128)
        shape = (int(parameters), 24, width, 4 * width, width, 128000)
        assumed = f"the shape of {name or path} is estimated from {source}"
    return ModelSize(
        *shape,
        levels=levels,
        positions_an_event=levels,
        weight_bytes=_WEIGHT_BYTES.get(precision, 4),
        assumed=assumed,
    )
