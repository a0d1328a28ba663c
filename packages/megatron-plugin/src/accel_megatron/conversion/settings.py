"""A configuration of transformers as settings of Megatron-core; what has none is refused by its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from accel_megatron.conversion.table import COMMON_UNUSED, ROPE

if TYPE_CHECKING:
    from accel_megatron.conversion.table import Family, FieldRule

Settings = dict[str, Any]

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def settings_of(family: Family, config: Mapping[str, Any], ignore: Iterable[str] = ()) -> Settings:
    """Settings of TransformerConfig and arguments of GPTModel that a configuration means.

    Args:
        config: `to_dict()` of a configuration of transformers, in the form of transformers 5.
        ignore: names of fields that the user says change nothing.

    Raises:
        ValueError: lists every field that has no equivalent, with its value.
    """
    settings: Settings = dict(family.settings)
    origins: dict[str, str] = {}
    refused: list[str] = []
    left_out = {*COMMON_UNUSED, *family.unused, *ignore} - family.fields.keys()
    for name, value in config.items():
        if name in left_out:
            continue
        try:
            found = _meant(family.fields.get(name), name, value)
        except ValueError as error:
            refused.append(str(error))
            continue
        for key, setting in found.items():
            if key in origins and settings[key] != setting:
                other = f"{origins[key]}={config[origins[key]]!r}"
                refused.append(f"{name}={value!r} (and {other}: both are {key}, which has one value)")
            settings[key], origins[key] = setting, name
    if refused:
        lines = "".join(f"\n  {each}" for each in refused)
        raise ValueError(
            f"A {family.model_type} model was to be converted, but some of its configuration has no equivalent in Megatron-core, or the table "
            f"does not say which:{lines}\nChange these fields; or, if one that is not in the table does not change what the "
            f"model computes, pass its name in ignore=[...]."
        )
    return {key: value for key, value in settings.items() if value is not None}


def _meant(rule: FieldRule | None, name: str, value: Any) -> Settings:
    """The settings that a field means. ValueError, with the field and its value, if there are none."""
    if rule is None:
        raise ValueError(f"{name}={value!r} (not in the table)")
    if isinstance(rule, str):
        return {rule: value}
    if rule is ROPE:
        return _rope(name, value)
    assert isinstance(rule, Mapping), "these are all forms of a rule"
    settings: Settings = {}
    for each in value if isinstance(value, (list, tuple)) else [value]:
        found = next((meant for accepted, meant in rule.items() if accepted == each), None)
        if found is None:
            raise ValueError(f"{name}={value!r} (it may be {' or '.join(map(repr, rule))})")
        settings |= found
    return settings


def _rope(name: str, value: Any) -> Settings:
    """Rotary embeddings: `{"rope_type": ..., "rope_theta": ..., ...}`."""
    if not isinstance(value, Mapping) or not {"rope_type", "rope_theta"} <= value.keys():
        raise ValueError(f"{name}={value!r} (it should have 'rope_type' and 'rope_theta', as in transformers 5)")
    rest = {key: number for key, number in value.items() if number is not None}
    kind = rest.pop("rope_type")
    if rest.get("partial_rotary_factor") == 1.0:
        del rest["partial_rotary_factor"]
    settings: Settings = {"rotary_base": rest.pop("rope_theta")}
    if kind == "linear":
        settings["seq_len_interpolation_factor"] = rest.pop("factor")
    elif kind == "llama3":
        for key, expected in _LLAMA3.items():  # Megatron-core has these as constants
            if (found := rest.pop(key, None)) != expected:
                raise ValueError(f"{name}[{key!r}]={found!r} (for the type 'llama3' Megatron-core has {expected!r})")
        settings |= {"rope_scaling": True, "rope_scaling_factor": rest.pop("factor")}
    elif kind != "default":
        raise ValueError(f"{name}['rope_type']={kind!r} (it may be 'default', 'linear', 'llama3')")
    for key, left in rest.items():
        raise ValueError(f"{name}[{key!r}]={left!r} (of the type {kind!r} Megatron-core has no such number)")
    return settings
