"""The form of a table: how a family of transformers' models and a Megatron-core GPT stand for each other.

A third party publishes a `Family` under an entry point; `families` has those of this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

GROUP: Final = "accel_megatron.families"
"""The group of entry points: the name is the `model_type` of a config.json, the value a `Family`."""

Combine = Literal["plain", "qkv", "gate_up"]


class Rope:
    """The mark of a field that holds rotary embeddings, as `rope_parameters` does."""


ROPE: Final = Rope()
"""Settings of rotary embeddings: the types "default", "linear" and "llama3", others are refused."""

FieldRule = str | Rope | Mapping[Any, Mapping[str, Any]]
"""How a field of the configuration is read: under another name, as `ROPE`, or by its value.

A text is the name of the setting in Megatron-core. A mapping has the values that can be converted,
each with the settings that it means, often none; of a list, each item is looked up.
"""


@dataclass(frozen=True)
class Row:
    """A parameter of Megatron-core, and the tensors of transformers that it is made of.

    Args:
        megatron: its name, or names under several layer specs. `{layer}` stands for the number of
            the layer in the whole model from 0, `{expert}` for that of the expert.
        transformers: the tensors, in the same form. Without `{expert}` where `megatron` has it,
            all experts are stacked along a first dimension.
        combine: "plain": one tensor. "qkv": three, or one that is their concatenation: queries,
            keys, values, which Megatron-core interleaves by query group. "gate_up": two, or one that
            is their concatenation, of both of which each tensor-parallel rank has its part.
        split: the dimension of Megatron's parameter that tensor parallelism splits; None: all ranks
            have all of it. For "qkv" and "gate_up" it is 0.
        transposed: transformers has (in, out) where Megatron-core has (out, in).
        padded: the first dimension is the vocabulary, which is padded in Megatron-core until
            tensor parallelism divides it.
    """

    megatron: str | tuple[str, ...]
    transformers: str | tuple[str, ...]
    combine: Combine = "plain"
    split: int | None = None
    transposed: bool = False
    padded: bool = False

    @property
    def megatron_names(self) -> tuple[str, ...]:
        """The patterns of Megatron's name, as a tuple."""
        return (self.megatron,) if isinstance(self.megatron, str) else self.megatron

    @property
    def sources(self) -> tuple[str, ...]:
        """The patterns of transformers' names, as a tuple."""
        return (self.transformers,) if isinstance(self.transformers, str) else self.transformers

    @property
    def is_stacked(self) -> bool:
        """Whether one tensor of transformers has all experts."""
        return "{expert}" in self.megatron_names[0] and "{expert}" not in self.sources[0]


@dataclass(frozen=True)
class Family:
    """The table of one `model_type` of transformers.

    Args:
        model_type: as in config.json.
        rows: every parameter of the Megatron-core model.
        fields: every field of the configuration that changes numbers. A field that is neither here
            nor in `unused` is refused by its name, and so is a value that has no settings.
        settings: what holds for the whole family: fields of TransformerConfig, arguments of GPTModel.
        tied: by the name of a tensor of transformers, the one that it is where the configuration
            ties embeddings (the setting `share_embeddings_and_output_weights`).
        unused: fields that change no number of the forward pass, beside `COMMON_UNUSED`.
        prefix: of names that some files have and others have not: "transformer.".
        ignored: ends of names of tensors in files that are no weights.
    """

    model_type: str
    rows: tuple[Row, ...]
    fields: Mapping[str, FieldRule]
    settings: Mapping[str, Any] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    unused: frozenset[str] = frozenset()
    prefix: str = ""
    ignored: tuple[str, ...] = ()


COMMON_UNUSED: Final = frozenset(
    {
        "_name_or_path", "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label",
        "is_encoder_decoder", "label2id", "model_type", "output_attentions", "output_hidden_states", "pad_token_id",
        "problem_type", "return_dict", "torch_dtype", "transformers_version", "use_cache",
    }
)  # fmt: skip
"""Fields of any configuration that change no number of the forward pass."""
